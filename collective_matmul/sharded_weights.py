"""The ops whose weights are sharded over a second mesh axis, with their gradients.

`collective_matmul.ops` derives them. Call them inside `jax.shard_map`. Between forward and backward
pass only shards are kept: the backward gathers the weights again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from collective_matmul import gradients
from collective_matmul._compat import psum_scatter
from collective_matmul.backends.base import GatherResidual, ShardedWeightBackend
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.explicit_axes import product_spec, specs_like, with_auto_axes
from collective_matmul.gradients import OpParams, gather_with_auto_axes
from collective_matmul.reverse_mode import ReverseMode
from collective_matmul.site import Op, WeightShards

# The types of `jax.custom_vjp` do not survive `functools.partial`.
_custom_vjp: Any = functools.partial(ReverseMode, nondiff_argnums=(2,))


@_custom_vjp
def gather_matmul(
    x: jax.Array, shards: tuple[jax.Array, ...], call: OpParams
) -> tuple[tuple[jax.Array, ...], GatherResidual]:
    """``all_gather(x) @ w`` for each weight; and the gathered x, if the call keeps it."""

    def products(x, shards):
        weights, keep = _weights(call, shards, x.dtype), call.keep_gathered
        xs = (x,) * len(shards)
        chosen = _chosen(call, "all_gather_matmul", xs, weights, keep_gathered=keep)
        return chosen.gather_with_shards(
            x,
            weights,
            call.axis_name,
            dimension=call.shard_dimension,
            transpose_w=call.transpose_w,
            keep_gathered=keep,
        )

    return gather_with_auto_axes(products, x, shards, call.transpose_w)


def _gather_matmul_gradients(call: OpParams, operands, cotangents):
    if call.keep_gathered or call.transpose_w:
        return _gradients_by_parts(gradients.gather_matmul, call, operands, cotangents)
    # Without the barrier, XLA would reuse what the forward gathered, and keep it until now.
    (x, shards), (dys, _) = lax.optimization_barrier((operands, cotangents))
    weights = _weights(call, shards, x.dtype)
    attributes: dict[str, Any] = {"direction": "backward", "co_gathered": x.shape}
    chosen = _chosen(call, "matmul_reduce_scatter", dys, weights, **attributes)
    dimension = call.shard_dimension
    return chosen.gather_with_shards_gradients(x, weights, dys, call.axis_name, dimension=dimension)


gather_matmul.define_gradients(_gather_matmul_gradients)


@_custom_vjp
def matmul_scatter(
    xs: tuple[jax.Array, ...], shards: tuple[jax.Array, ...], call: OpParams
) -> jax.Array:
    """``reduce_scatter(sum of x @ w)`` over pairs of an x and the weight of a shard."""

    def product(xs, shards):
        weights = _weights(call, shards, xs[0].dtype)
        chosen = _chosen(call, "matmul_reduce_scatter", xs, weights)
        return chosen.scatter_with_shards(
            xs,
            weights,
            call.axis_name,
            dimension=call.shard_dimension,
            transpose_w=call.transpose_w,
        )

    return with_auto_axes(
        product, lambda: product_spec(xs[0], shards[0], call.transpose_w), xs, shards
    )


def _matmul_scatter_gradients(call: OpParams, operands, dy):
    if len(operands[1]) > 1 or call.transpose_w:
        return _gradients_by_parts(gradients.matmul_scatter, call, operands, dy)
    (xs, shards), dy = lax.optimization_barrier((operands, dy))
    (x,) = xs
    weights = _weights(call, shards, x.dtype)
    attributes: dict[str, Any] = {"direction": "backward", "keep_gathered": True}
    chosen = _chosen(call, "all_gather_matmul", (dy,), weights, **attributes)
    dimension = call.shard_dimension
    dx, dws = chosen.scatter_with_shards_gradients(
        x, weights, dy, call.axis_name, dimension=dimension
    )
    return (dx,), dws


matmul_scatter.define_gradients(_matmul_scatter_gradients)


def _gradients_by_parts(op: Callable, call: OpParams, operands, cotangents):
    """The gradients of an op on whole weights, and of the gathers of these.

    For the forms that only `collective_matmul.overlap` calls, in programs that contain gradients.
    """
    shards, whole = call.weight_shards, replace(call, weight_shards=None)

    def parts(xs, ws):
        dtype = jax.tree.leaves(xs)[0].dtype
        return op(xs, tuple(gather_weight(w, shards, dtype) for w in ws), whole)

    return jax.vjp(parts, *operands)[1](cotangents)


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
        return psum_scatter(gradient, shards.axis_name, shards.dimension)

    return (with_auto_axes(scatter, lambda: specs_like(shard), gradient),)


gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)
