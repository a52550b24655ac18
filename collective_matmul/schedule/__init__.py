"""Schedules of chunks between devices, and their walk with permutes."""
