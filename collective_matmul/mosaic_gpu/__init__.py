"""What kernels for Hopper GPUs share: the matmul, its tiling, and memory of peer GPUs."""
