"""Candidates of a comparison: how they communicate, how they are compiled, and who is timed."""
