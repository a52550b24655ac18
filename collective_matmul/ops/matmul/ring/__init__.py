"""Rings of permutes: the schedules, the walk over them, and their cost.

The input is a request with its operands. The output is the product, computed chunk by chunk while
other chunks travel.
"""
