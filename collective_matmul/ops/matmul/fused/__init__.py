"""The fused kernels: their launches, bodies and configurations."""
