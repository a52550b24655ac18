"""Measures backends on this machine and saves what it finds."""
