"""Optimizers and their schedule.

Summed gradients of sharded parameters enter, and their updates leave.
"""
