"""The fused kernels: whether they are right, how long they take, and how they are best cut."""
