"""Building blocks of kernels for Hopper GPUs: the matmul, its tiling, memory of peer GPUs."""
