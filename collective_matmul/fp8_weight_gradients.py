"""Weight gradients whose operands are messages: products contracted over shards of many scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from collective_matmul.fp8 import Recipe
from collective_matmul.fp8_messages import message_scales, message_values, value_columns


def weight_gradients(
    xs: Sequence[jax.Array],
    dys: Sequence[jax.Array],
    recipe: Recipe,
    dtype: Any,
    *,
    shards: int = 1,
    dimension: int = 0,
) -> list[jax.Array]:
    """``xᵀ dy`` [K, N] of each x and dy, contracted over all rows, in 8 bits.

    Shards may have different scales, as they were quantized by different devices. The sum over rows
    then has one scale, the largest, and the rows of dy, of more range than x, are multiplied by the
    ratio of theirs to it. All scales are powers of two, so this rounds only what becomes subnormal,
    and the shards of a gathered message need not agree on a scale.

    Nor does the scale of the sum round: it multiplies a rounded bfloat16 sum. So the matmul itself
    writes bfloat16: float32 would be twice the bytes, and one more pass.

    Args:
      xs: messages [..., K + bytes], with one scale for each shard.
      dys: messages [..., N + bytes], likewise; either as many as xs, or xs is one for all of them.
      recipe: tells the dtypes of their values.
      dtype: dtype of the results.
      shards: how many shards of equal size the messages have. One that is not gathered may count as
        many of them, which have the same scale.
      dimension: the dimension of the messages along which the shards follow each other.
    """
    x_scales = [_scales_of_shards(x, shards, dimension) for x in xs]
    x_values = [_rows_last(message_values(x, value_columns(x), recipe.dtype)) for x in xs]
    if len(xs) == 1:
        x_scales, x_values = x_scales * len(dys), x_values * len(dys)
    dy_values, scales = zip(
        *(
            _with_common_scale(scales, dy, recipe, dimension)
            for scales, dy in zip(x_scales, dys, strict=True)
        ),
        strict=True,
    )
    # XLA multiplies by a scale in the matmul if nothing else does, and merges equal scales.
    scales = lax.optimization_barrier(scales)
    # float16 has no room for sums that are not scaled yet.
    sums = dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    rows = tuple(range(1, xs[0].ndim))
    gradients = []
    for x, dy, scale in zip(x_values, map(_rows_last, dy_values), scales, strict=True):
        product = lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=sums)
        gradients.append((product * scale.astype(sums)).astype(dtype))
    return gradients


def _with_common_scale(
    x_scales: jax.Array, dy: jax.Array, recipe: Recipe, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """The values of dy in a sum over rows that has one scale, and this scale."""
    shards = x_scales.size
    dy_scales = _scales_of_shards(dy, shards, dimension)
    x_largest, dy_largest = jnp.max(x_scales), jnp.max(dy_scales)
    values = message_values(dy, value_columns(dy), recipe.gradient_dtype)
    if shards > 1:
        ratios = (x_scales / x_largest) * (dy_scales / dy_largest)
        divided = (*dy.shape[:dimension], shards, -1, *values.shape[dimension + 1 :])
        ratios = lax.expand_dims(ratios, (*range(dimension), *range(dimension + 1, len(divided))))
        multiplied = values.reshape(divided).astype(jnp.float32) * ratios
        values = multiplied.astype(recipe.gradient_dtype).reshape(values.shape)
    # Not infinite, of which a sum of zero would make a NaN.
    return values, jnp.minimum(x_largest * dy_largest, 2.0**127)


def _scales_of_shards(message: jax.Array, shards: int, dimension: int) -> jax.Array:
    """The scales [shards] of a message's shards, each read from one row: the others repeat it."""
    size = message.shape[dimension] // shards
    first = [slice(1)] * message.ndim
    first[dimension], first[-1] = slice(None, None, size), slice(None)
    return message_scales(message[tuple(first)], value_columns(message), 1).reshape(shards)


def _rows_last(values: jax.Array) -> jax.Array:
    """The values [..., K] as [K, ...], in memory too: Hopper's matmuls in 8 bits want it so.

    XLA would transpose them for each matmul, in a pass of its own: it does so when it chooses a
    kernel, after it fused what there is. This transpose is part of the pass that computes the
    values. The constraints keep layouts from propagating to it, and so beyond it; the barrier keeps
    it out of the matmul.
    """
    row_major = Layout(tuple(range(values.ndim)))
    values = with_layout_constraint(values, row_major)
    moved = with_layout_constraint(jnp.moveaxis(values, -1, 0), row_major)
    return lax.optimization_barrier(moved)
