"""Single ops and matmuls beside XLA's and others, and the fastest configurations of kernels."""
