"""Building blocks of kernels for Hopper GPUs.

Inputs are shapes and references from the kernels of the ops. Nothing here knows an op.

- hopper_matmul/: the matmul. peers/: the memory of peer GPUs.
- device: the GPU that a program is traced for. requirements: what kernels with peers need.
  kernel_types: types that kernels share. race_injection: delays for tests.
"""
