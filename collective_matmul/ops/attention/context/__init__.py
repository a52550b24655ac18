"""Attention over a sequence that a mesh axis divides."""
