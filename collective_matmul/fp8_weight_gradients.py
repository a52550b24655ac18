"""Weight gradients whose operands are messages: products contracted over rows of many scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.fp8 import Recipe
from collective_matmul.fp8_messages import message_scales, message_values, value_columns


def weight_gradients(
    pairs: Sequence[tuple[jax.Array, jax.Array]], recipe: Recipe, dtype: Any
) -> list[jax.Array]:
    """``xᵀ dy`` [K, N] of each pair of messages, contracted over all rows, in 8 bits.

    Rows may have different scales, as those of different devices have. The sum over rows then has
    one scale, the largest, and the rows of dy, of more range than x, are multiplied by the ratio of
    theirs to it. All scales are powers of two, so this rounds only what becomes subnormal, and the
    shards of a gathered message need not agree on a scale.

    Nor does the scale of the sum round: it multiplies a rounded bfloat16 sum. So the matmul itself
    writes bfloat16: float32 would be twice the bytes, and one more pass.

    Args:
      pairs: messages of x [..., K + bytes] and dy [..., N + bytes], with one scale for each row.
      recipe: tells the dtypes of their values.
      dtype: dtype of the results.
    """
    operands, scales = zip(*(_with_common_scale(x, dy, recipe) for x, dy in pairs), strict=True)
    # XLA multiplies by a scale in the matmul if nothing else does, and merges equal scales.
    scales = lax.optimization_barrier(scales)
    # float16 has no room for sums that are not scaled yet.
    sums = dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    rows = tuple(range(pairs[0][0].ndim - 1))
    gradients = []
    for (x, dy), scale in zip(operands, scales, strict=True):
        product = lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=sums)
        gradients.append((product * scale.astype(sums)).astype(dtype))
    return gradients


def _with_common_scale(
    x: jax.Array, dy: jax.Array, recipe: Recipe
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The values of two messages, and the scale of their products in the sum over rows."""
    x_columns, dy_columns = value_columns(x), value_columns(dy)
    x_scales, dy_scales = message_scales(x, x_columns, 1), message_scales(dy, dy_columns, 1)
    x_largest, dy_largest = jnp.max(x_scales), jnp.max(dy_scales)
    ratios = (x_scales / x_largest) * (dy_scales / dy_largest)
    values = message_values(dy, dy_columns, recipe.gradient_dtype).astype(jnp.float32) * ratios
    operands = message_values(x, x_columns, recipe.dtype), values.astype(recipe.gradient_dtype)
    return operands, x_largest * dy_largest
