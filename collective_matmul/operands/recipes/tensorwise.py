"""Tensor-wise: one scale for each device's shard of x, and one for w.

Scales are powers of two. So a weight gradient can contract rows in 8 bits, also those of shards
that have different scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from collective_matmul._compat import pmax
from collective_matmul.operands.recipes.recipe import E5M2, SCALE_CHECKPOINT_NAME, Recipe
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from collective_matmul.operands.scaled.scaling import (
    Array,
    largest_magnitude,
    magnitude,
    next_power_of_two,
    scale_of,
)


@dataclass(frozen=True)
class Tensorwise(Recipe):
    """One scale for an array."""

    packs_gradients = True

    def largest_of_rows(self, x: Array) -> jax.Array:
        """The largest magnitude of x, [1, ..., 1]."""
        return jnp.max(magnitude(x), axis=None, keepdims=True)

    def row_scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The scale of all rows, which checkpoint policies can save."""
        return checkpoint_name(self.scale(largest, dtype), SCALE_CHECKPOINT_NAME)

    def scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """A power of two: a weight gradient multiplies operands by ratios of scales, exactly."""
        return next_power_of_two(scale_of(largest, dtype))

    def magnitudes(self, w: Array) -> Any:
        """The largest of the array, [1, 1]."""
        return largest_magnitude(w, (0, 1))

    def largest_of_columns(self, magnitudes: Any, transposed: bool) -> jax.Array:
        """The largest of all columns, which is that of the transpose too."""
        del transposed
        return magnitudes

    def scaled(
        self,
        ws: Sequence[Array],
        axis_name: str | None,
        dimension: int,
        largest: Sequence[jax.Array] | None = None,
    ) -> tuple[ScaledMatrix, ...]:
        """Scaled matrices of weights; see `Recipe`."""
        common = functools.reduce(jnp.maximum, largest or map(self.magnitudes, ws))
        repeats = 1
        if axis_name is not None:
            common = pmax(common, axis_name)
            repeats = lax.axis_size(axis_name) if dimension == 1 else 1
        scale = self.scale(common, self.dtype)
        columns = [jnp.broadcast_to(scale[0], (w.shape[1] * repeats,)) for w in ws]
        return self.divided(ws, scale, columns)

    def weight_gradients(
        self, xs: Sequence[Any], dys: Sequence[Any], dtype: Any, *, shards: int, dimension: int
    ) -> Sequence[jax.Array]:
        """``xᵀ dy`` [K, N] of each x and dy, contracted over all rows, in 8 bits; see `Format`.

        Shards may have different scales, as they were quantized by different devices. The sum over
        rows then has one scale, the largest, and the rows of dy, of more range than x, are
        multiplied by the ratio of theirs to it. All scales are powers of two, so this rounds only
        what becomes subnormal, and the shards of gathered rows need not agree on a scale. Rows that
        are not gathered count as shards which have the same scale.

        Nor does the scale of the sum round: it multiplies a rounded bfloat16 sum. So the matmul
        itself writes bfloat16: float32 would be twice the bytes, and one more pass.
        """
        x_scales = [_scales_of_shards(x, shards, dimension) for x in xs]
        x_values = [_rows_last(x.values) for x in xs]
        if len(xs) == 1:
            x_scales, x_values = x_scales * len(dys), x_values * len(dys)
        if len(dys) == 1:
            dys = [*dys] * len(x_scales)
        pairs = zip(x_scales, dys, strict=True)
        scaled = [_with_common_scale(scales, dy, dimension) for scales, dy in pairs]
        dy_values, scales = zip(*scaled, strict=True)
        # XLA multiplies by a scale in the matmul if nothing else does, and merges equal scales.
        scales = lax.optimization_barrier(scales)
        # float16 has no room for sums that are not scaled yet.
        sums = dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
        rows = tuple(range(1, len(xs[0].shape)))
        gradients = []
        for x, dy, scale in zip(x_values, map(_rows_last, dy_values), scales, strict=True):
            product = lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=sums)
            gradients.append((product * scale.astype(sums)).astype(dtype))
        return gradients


TENSORWISE = Tensorwise("tensorwise", gradient_dtype=E5M2)


def _with_common_scale(
    x_scales: jax.Array, dy: PackedRows, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """The values of dy in a sum over rows that has one scale, and this scale."""
    shards = x_scales.size
    dy_scales = _scales_of_shards(dy, shards, dimension)
    x_largest, dy_largest = jnp.max(x_scales), jnp.max(dy_scales)
    values = dy.values
    if shards > 1:
        ratios = (x_scales / x_largest) * (dy_scales / dy_largest)
        divided = (*dy.shape[:dimension], shards, -1, *values.shape[dimension + 1 :])
        ratios = lax.expand_dims(ratios, (*range(dimension), *range(dimension + 1, len(divided))))
        multiplied = values.reshape(divided).astype(jnp.float32) * ratios
        values = multiplied.astype(dy.dtype).reshape(values.shape)
    # Not infinite, of which a sum of zero would make a NaN.
    return values, jnp.minimum(x_largest * dy_largest, 2.0**127)


def _scales_of_shards(rows: PackedRows, shards: int, dimension: int) -> jax.Array:
    """The scales [shards] of the shards, each read from one row: the others repeat it."""
    size = rows.shape[dimension] // shards
    first = [slice(1)] * len(rows.shape)
    first[dimension], first[-1] = slice(None, None, size), slice(None)
    return dataclasses.replace(rows, packed=rows.packed[tuple(first)]).scales.reshape(shards)


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
