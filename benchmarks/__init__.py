"""``python -m benchmarks``: the collective matmuls timed beside what they are measured by."""
