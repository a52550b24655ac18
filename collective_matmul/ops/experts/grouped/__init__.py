"""Grouped matmuls: groups of rows, each multiplied by a matrix of its own.

Inputs are sorted rows, the sizes of the groups, and one matrix for each. Outputs are the products.
xla, triton and mosaic are the backends.
"""
