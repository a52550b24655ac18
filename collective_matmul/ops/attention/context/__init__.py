"""Attention over a sequence that a mesh axis divides.

Inputs are a device's part of the queries, keys and values. The output is the attention of its
queries to the whole sequence. gather, context_ring and ulysses are backends; local/ is the part of
the work that needs no other device.
"""
