"""The layers of a model, for use inside `jax.shard_map`: attention, experts, norms, embedding and
loss. `plain` has linear layers without this library."""
