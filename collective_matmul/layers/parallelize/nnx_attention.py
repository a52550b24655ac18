"""Flax's nnx attention with its heads divided over the axis and one gather for q, k and v."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from collective_matmul.layers.linear.linear import ColumnParallelLinear, SharedProjections
from collective_matmul.layers.parallelize.placement import keep_heads_divided, mesh_of_arrays, place
from collective_matmul.layers.sharding_context import LocalShards, current_context, known_axis_size

PROJECTIONS = ("query", "key", "value")
CACHES = ("cached_key", "cached_value")


@functools.cache
def parallel_attention(kind: type[nnx.MultiHeadAttention]) -> type[nnx.MultiHeadAttention]:
    """A subclass of an attention class whose query, key and value layers share a gather.

    Args:
      kind: `nnx.MultiHeadAttention`, or a subclass that inherits its `__call__`.
    """

    class ParallelAttention(kind):  # pyright: ignore[reportGeneralTypeIssues]
        # The results of the three layers are computed first. Flax's own code then calls the layers
        # one after the other, and each finds its result.
        def __call__(
            self,
            inputs_q: jax.Array,
            inputs_k: jax.Array | None = None,
            inputs_v: jax.Array | None = None,
            **options: Any,
        ) -> jax.Array:
            if inputs_k is None and inputs_v is not None:  # Flax refuses this.
                return super().__call__(inputs_q, inputs_k, inputs_v, **options)
            inputs_k = inputs_q if inputs_k is None else inputs_k
            inputs_v = inputs_k if inputs_v is None else inputs_v
            projections = _projections(self, (inputs_q, inputs_k, inputs_v))
            decode = options.get("decode")
            if not (self.decode if decode is None else decode):
                return super().__call__(*projections, **options)
            key = projections[1].results[id(_key_layer(self))]
            _keep_caches_divided(self, key)
            y = super().__call__(*projections, **options)
            _keep_caches_divided(self, key)
            return y

        def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> None:
            axis = _key_layer(self).axis_name, _key_layer(self).mesh
            context = current_context(*axis) if known_axis_size(*axis) else None
            pieces = context.devices if isinstance(context, LocalShards) else 1
            heads = self.num_kv_heads * _key_layer(self).copies // pieces
            shape = (*input_shape[:-1], heads, self.head_dim)
            for name in CACHES:
                setattr(self, name, nnx.Cache(jnp.zeros(shape, dtype)))
            self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))
            shard_caches(self)

    ParallelAttention.__name__ = ParallelAttention.__qualname__ = f"Parallel{kind.__name__}"
    return ParallelAttention


def _projections(
    module: nnx.MultiHeadAttention, inputs: tuple[jax.Array, jax.Array, jax.Array]
) -> list[Any]:
    """`SharedProjections` for each input; equal inputs have one object, and one gather."""
    by_input: dict[int, SharedProjections] = {}
    for x in inputs:
        if id(x) not in by_input:
            names = [n for n, other in zip(PROJECTIONS, inputs, strict=True) if other is x]
            by_input[id(x)] = SharedProjections.compute(x, [getattr(module, n) for n in names])
    return [by_input[id(x)] for x in inputs]


def _key_layer(module: nnx.MultiHeadAttention) -> ColumnParallelLinear:
    layer: Any = module.key
    return layer


def can_share_gather(module: nnx.MultiHeadAttention) -> bool:
    """Whether query, key and value are column-parallel layers that gather the same dimension."""
    layers = [getattr(module, name) for name in PROJECTIONS]
    return all(isinstance(layer, ColumnParallelLinear) for layer in layers) and (
        len({layer.gather_dimension for layer in layers}) == 1
    )


def _keep_caches_divided(module: nnx.MultiHeadAttention, key: jax.Array) -> None:
    """Keeps the sharding of the caches in a decoding step, for the new keys `key`."""
    layer = _key_layer(module)
    mesh = mesh_of_arrays(layer.mesh)
    for cache in (module.cached_key, module.cached_value):
        if mesh is not None and cache is not None:  # Without a cache Flax raises.
            cache.set_value(keep_heads_divided(cache.get_value(), key, layer.axis_name, mesh))


def copy_heads_of_caches(module: nnx.MultiHeadAttention) -> None:
    """Repeats the heads that several devices compute, in caches that were made for each once."""
    copies = _key_layer(module).copies
    for name in CACHES:
        cache = getattr(module, name)
        if copies == 1 or cache is None:
            continue
        value, repeat = cache.get_value(), functools.partial(jnp.repeat, repeats=copies, axis=-2)
        is_shape = isinstance(value, jax.ShapeDtypeStruct)
        cache.set_value(jax.eval_shape(repeat, value) if is_shape else repeat(value))


def shard_caches(module: nnx.MultiHeadAttention) -> None:
    """Divides the heads of the caches over the axis, where the mesh is known."""
    layer = _key_layer(module)
    mesh = mesh_of_arrays(layer.mesh)
    for name in CACHES:
        cache = getattr(module, name)
        if cache is None:
            continue
        names = (*[None] * (len(cache.shape) - 2), layer.axis_name, None)
        if cache.get_metadata().get("out_sharding") != names:
            cache = nnx.Cache(cache.get_value(), out_sharding=names, eager_sharding=False)
            setattr(module, name, cache)
        if mesh is not None:
            cache.set_value(place(cache.get_value(), mesh, P(*names)))
