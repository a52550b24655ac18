"""Grouped matmuls for Hopper GPUs: rows in groups, each times a matrix of its own.

Inputs are sorted rows, or rows that are read by index, the sizes of the groups, and one matrix for
each; operands may be in 8 bits with scales. Outputs are the products; or, of two arrays of rows,
the products of each group's rows.

- grouped_matmul: one launch. group_tiles: the tiles that groups have.
- product_kernel, scaled_product_kernel, gradient_kernel: the kernels, on top of `hopper_matmul`.
- row_loader and row_copies: rows that TMA cannot copy.
"""
