"""Blocks of one structure whose parameters are stacked: each has a leading dimension of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Keys:
    """The keys of `nnx.Rngs`, counted in Python.

    `nnx.Rngs` counts with an array. In a trace, the time for that grows with the square of the
    number of layers.

    Args:
      key: the key that all are made of.
      start: the number of the first one, int32 [].
    """

    def __init__(self, key: jax.Array, start: int | jax.Array = 0):
        self.key, self.start = key, start
        self.count = 0

    def params(self) -> jax.Array:
        """The next key."""
        number = self.start + self.count
        self.count += 1
        return jax.random.fold_in(self.key, number)


def stack_blocks(make: Callable[[Any], nnx.Module], count: int, rngs: nnx.Rngs | Keys) -> Any:
    """Makes blocks as ``[make(rngs) for _ in range(count)]`` does, as one module.

    Its parameters are [count, ...], in the same values. It is for `nnx.graphdef` and `nnx.state`,
    not to be called.

    Args:
      make: makes a block from `rngs`, of which it takes as many keys each time.
      count: the number of blocks.
      rngs: random keys.
    """
    keys = rngs if isinstance(rngs, Keys) else Keys(rngs.params())
    own = Keys(keys.key)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(own)))
    first = keys.start + keys.count

    def parameters(number: jax.Array) -> nnx.State:
        return nnx.state(make(Keys(keys.key, first + number * own.count)))

    stacked = jax.vmap(parameters)(jnp.arange(count))
    keys.count += count * own.count
    for _, variable in nnx.to_flat_state(stacked):
        names = variable.get_metadata().get("out_sharding")
        if names is not None:
            variable.set_metadata(out_sharding=(None, *names))
    return nnx.merge(graph, stacked)
