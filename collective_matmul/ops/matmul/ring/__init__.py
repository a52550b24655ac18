"""Rings of permutes: the schedules, the walk over them, and their cost."""
