"""Counts of things as text."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with what it counts: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
