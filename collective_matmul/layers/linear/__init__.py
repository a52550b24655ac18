"""Column- and row-parallel linear layers, their adapters, and layers that share a gather.

In come kernels and rows, local or global. `functions` multiplies them by the ops; the other files
are Flax nnx modules that call it.
"""
