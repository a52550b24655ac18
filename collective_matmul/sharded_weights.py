"""The ops whose weights are sharded over a second mesh axis, with their gradients.

`collective_matmul.ops` derives them. Call them inside `jax.shard_map`. Between forward and backward
pass only shards are kept: the backward gathers the weights again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul.backends.base import ShardedWeightBackend
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.explicit_axes import product_spec, specs_like, with_auto_axes
from collective_matmul.gradients import OpParams, ReverseMode
from collective_matmul.site import Op, WeightShards

# The types of `jax.custom_vjp` do not survive `functools.partial`.
_custom_vjp: Any = functools.partial(ReverseMode, nondiff_argnums=(2,))


@_custom_vjp
def gather_matmul(
    x: jax.Array, shards: tuple[jax.Array, ...], call: OpParams
) -> tuple[jax.Array, ...]:
    """``all_gather(x) @ w`` for the weight w of each shard."""

    def products(x, shards):
        weights = _weights(call, shards, x.dtype)
        chosen = _chosen(call, "all_gather_matmul", (x,) * len(shards), weights)
        dimension = call.shard_dimension
        return chosen.gather_with_shards(x, weights, call.axis_name, dimension=dimension)

    return with_auto_axes(products, lambda: tuple(product_spec(x, w) for w in shards), x, shards)


def _gather_matmul_gradients(call: OpParams, operands, dys):
    # Without the barrier, XLA would reuse what the forward gathered, and keep it until now.
    (x, shards), dys = lax.optimization_barrier((operands, dys))
    weights = _weights(call, shards, x.dtype)
    attributes: dict[str, Any] = {"direction": "backward", "co_gathered": x.shape}
    chosen = _chosen(call, "matmul_reduce_scatter", dys, weights, **attributes)
    dimension = call.shard_dimension
    return chosen.gather_with_shards_gradients(x, weights, dys, call.axis_name, dimension=dimension)


gather_matmul.define_gradients(_gather_matmul_gradients)


@_custom_vjp
def matmul_scatter(x: jax.Array, shards: tuple[jax.Array, ...], call: OpParams) -> jax.Array:
    """``reduce_scatter(x @ w)`` for the weight w of the only shard."""

    def product(x, shards):
        weights = _weights(call, shards, x.dtype)
        chosen = _chosen(call, "matmul_reduce_scatter", (x,), weights)
        dimension = call.shard_dimension
        return chosen.scatter_with_shards(x, weights, call.axis_name, dimension=dimension)

    return with_auto_axes(product, lambda: product_spec(x, shards[0]), x, shards)


def _matmul_scatter_gradients(call: OpParams, operands, dy):
    (x, shards), dy = lax.optimization_barrier((operands, dy))
    weights = _weights(call, shards, x.dtype)
    attributes: dict[str, Any] = {"direction": "backward", "keep_gathered": True}
    chosen = _chosen(call, "all_gather_matmul", (dy,), weights, **attributes)
    dimension = call.shard_dimension
    return chosen.scatter_with_shards_gradients(x, weights, dy, call.axis_name, dimension=dimension)


matmul_scatter.define_gradients(_matmul_scatter_gradients)


def _weights(call: OpParams, shards: Sequence[jax.Array], dtype: Any) -> ShardedWeights:
    """The weights of these shards, cast to `dtype` before they are gathered."""
    assert call.weight_shards is not None
    cast = tuple(shard.astype(dtype) for shard in shards)
    return ShardedWeights(cast, call.weight_shards, shards[0].dtype)


def _chosen(
    call: OpParams, op: Op, xs: Sequence[jax.Array], weights: ShardedWeights, **attributes: Any
) -> ShardedWeightBackend:
    """The backend for one pass; `attributes` are further attributes of its `Site`."""
    chosen: Any = call.choose(op, xs, weights.whole, **attributes)
    return chosen


_custom_vjp_of_shard: Any = functools.partial(ReverseMode, nondiff_argnums=(1, 2))


@_custom_vjp_of_shard
def gather_weight(shard: jax.Array, shards: WeightShards, dtype: Any) -> jax.Array:
    """The whole weight [K, N] of a shard, cast to `dtype` before the gather.

    Its gradient is summed over the axis in the shard's dtype, and scattered.
    """

    def gather(shard):
        cast = shard.astype(dtype)
        return lax.all_gather(cast, shards.axis_name, axis=shards.dimension, tiled=True)

    return with_auto_axes(gather, lambda: specs_like(shard), shard)


def _gather_weight_forward(shard, shards: WeightShards, dtype):
    return gather_weight(shard, shards, dtype), shard


def _gather_weight_backward(shards: WeightShards, dtype, shard, gradient):
    del dtype

    def scatter(gradient):
        gradient = gradient.astype(shard.dtype)
        dimension = shards.dimension
        return lax.psum_scatter(gradient, shards.axis_name, scatter_dimension=dimension, tiled=True)

    return (with_auto_axes(scatter, lambda: specs_like(shard), gradient),)


gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)
