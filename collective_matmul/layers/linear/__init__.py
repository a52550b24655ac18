"""Column- and row-parallel linear layers, their adapters, and layers that share a gather.

Inputs are rows and kernels, local or global; outputs are their products. `functions` calls the ops
with arrays. `linear`, `blocks` and `lora` are Flax nnx modules that call it, and `shared_calls`
collects the calls of layers on one x.
"""
