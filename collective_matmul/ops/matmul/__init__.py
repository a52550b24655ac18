"""Matmuls whose communication is hidden under them: the ops, their requests and backends.

Inputs are the local shards of x and of weights. Outputs are local shards of the product.

- api, frozen_api, einsum, prequantize: the functions that users call, with their checks.
- gradients, frozen, reverse_mode: derivatives. request, call: a call as data.
- backend, backends: the contract and the registry. xla, ring/, one_shot/, fused/: the backends.
"""
