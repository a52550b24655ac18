"""Collectives of our own for few rows: each device writes to all peers at once.

The input is a request with its operands; the output is the product of the gathered rows, or the
sum of products.
"""
