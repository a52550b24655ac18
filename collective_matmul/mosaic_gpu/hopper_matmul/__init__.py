"""The matmul for Hopper GPUs: its kernels, their tilings, and chunks of arrays as operands.

In come views of arrays, in 16 bits or in 8 bits with scales. The product is stored in place, or
given tile by tile to the kernel that calls it.
"""
