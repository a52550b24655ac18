"""The ops: a folder for each family, with its functions, requests, gradients and backends.

Inputs and outputs are the local arrays of a device, inside `jax.shard_map`.
"""
