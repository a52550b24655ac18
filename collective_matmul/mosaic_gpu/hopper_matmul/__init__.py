"""The matmul for Hopper GPUs: its kernels, their tilings, and chunks of arrays as operands.

Inputs are views of arrays, in half precision or in 8 bits with scales. The output is the product,
which is stored in place, or passed tile by tile to the kernel that calls it.

- chunk_matmul: chunks of arrays. matmul: one launch. tiling: the best tiling for a problem.
- matmul_kernel: the kernel. tile_scheduler, tile_loader and operands are its parts.
- scaled_kernel and row_scales: operands in 8 bits.
"""
