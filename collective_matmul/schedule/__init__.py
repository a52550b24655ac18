"""Schedules of chunks between devices, and their walk with permutes.

The input is a schedule and a pytree of arrays. The output is the chunks that arrive, one after the
other, or their sums. schedules is pure Python; walk and round_trip execute.
"""
