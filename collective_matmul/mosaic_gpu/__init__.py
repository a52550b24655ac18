"""Building blocks of kernels for Hopper GPUs.

`hopper_matmul/` multiplies, `peers/` reaches the memory of peer GPUs. In come shapes and references
from the kernels of the ops; nothing here knows an op.
"""
