"""Block-wise: a scale for 128 numbers of a row of x, and for each block of 128 × 128 of w."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import axis_index, partly_automatic
from collective_matmul.mosaic_gpu import device
from collective_matmul.operands.format import Shapes
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix, transposed_values
from collective_matmul.operands.scaled.scaled_rows import ScaledRows
from collective_matmul.operands.scaled.scaling import (
    BLOCK,
    Array,
    divided_into_blocks,
    largest_magnitude,
    magnitude,
    rounded,
    scale_of,
    spread,
)


@dataclass(frozen=True)
class Blockwise(Recipe):
    """Scales of blocks, which arrays of one sum of products need not have in common."""

    scaled_parts = "blocks"
    relative_seconds = 0.74
    ring_error = None

    @property
    def block(self) -> int | None:
        """The numbers of a row that have a scale in common."""
        return BLOCK

    def rows(self, xs: Sequence[Array], *, of_gradient: bool = False) -> tuple[PackedRows, ...]:
        """Packed rows of arrays; see `Format`."""
        dtype = self.gradient_dtype if of_gradient else self.dtype
        return tuple(self._rows(x, dtype) for x in xs)

    def _rows(self, x: Array, dtype: jnp.dtype) -> PackedRows:
        values, scales = _rounded_rows(x, dtype)
        values = lax.slice_in_dim(values, 0, x.shape[-1], axis=-1)
        return self.packed(values, scales, x)

    def local_rows(
        self, xs: Sequence[Array], *, of_gradient: bool = False
    ) -> tuple[ScaledRows, ...] | None:
        """Rows in whole blocks; see `Format`."""
        if any(x.shape[-1] % BLOCK for x in xs):
            return None
        dtype = self.gradient_dtype if of_gradient else self.dtype
        return tuple(ScaledRows(*_rounded_rows(x, dtype), BLOCK) for x in xs)

    def magnitudes(self, w: Array) -> None:
        """None: those of blocks are found with their scales."""
        del w

    def scaled(
        self,
        ws: Sequence[Array],
        axis_name: str | None,
        dimension: int,
        largest: Sequence[jax.Array] | None = None,
    ) -> tuple[ScaledMatrix, ...]:
        """Scaled matrices of weights; see `Recipe`."""
        del largest
        blocks = (_rounded_blocks(w.T, self.dtype, axis_name, 1 - dimension) for w in ws)
        pairs = zip(blocks, ws, strict=True)
        return tuple(ScaledMatrix(values, scales, w.dtype) for (values, scales), w in pairs)

    def transposed(self, matrix: ScaledMatrix) -> tuple[ScaledMatrix, None]:
        """The transpose, bit for bit: blocks are square."""
        values = transposed_values(matrix.values)
        return ScaledMatrix(values, matrix.scales.T, matrix.product_dtype), None

    def multiplied_dtypes(
        self, shapes: Shapes, rows: int, dtype: Any, *, backward: bool
    ) -> tuple[str, str]:
        """XLA has no matmul with scales of blocks: without our kernel, it multiplies float32."""
        runs_kernel = device.target() is not None and not partly_automatic()
        half_precision = dtype in (jnp.bfloat16, jnp.float16)
        if runs_kernel and half_precision and self.fits_kernel(shapes, rows, backward=backward):
            return self.operand_dtypes(dtype, backward=backward)
        return "float32", "float32"


BLOCKWISE = Blockwise("blockwise")


def _rounded_rows(x: Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The values of rows, with those of a last block that zeros fill up, and scales of blocks."""
    blocks = divided_into_blocks(x, -1)
    scale = scale_of(jnp.max(magnitude(blocks), axis=-1, keepdims=True), dtype)
    values = rounded(blocks, scale, dtype).reshape(*x.shape[:-1], -1)
    return values, scale.reshape(*x.shape[:-1], -1)


def _rounded_blocks(
    w: Array, dtype: jnp.dtype, axis_name: str | None, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """The values of a matrix [N, K], and the scales of its blocks of 128 × 128.

    If an axis shards a dimension, the scales are those of the whole matrix. A shard may begin and
    end inside a block: it is divided into parts that are inside of one block each.
    """
    rows, columns = (
        math.gcd(size, BLOCK) if axis_name is not None and place == dimension else BLOCK
        for place, size in enumerate(w.shape)
    )
    parts = divided_into_blocks(
        divided_into_blocks(w, 0, rows), 2, columns
    )  # [N / rows, rows, K / columns, columns]
    scale = scale_of(largest_magnitude(parts, (1, 3)), dtype)
    scales = scale[:, 0, :, 0]
    if axis_name is not None:
        own, scales = _scales_of_blocks(
            scales, BLOCK // (rows, columns)[dimension], axis_name, dimension
        )
        scale = own[:, None, :, None]
    values = rounded(parts, scale, dtype)
    values = values.reshape(math.prod(values.shape[:2]), -1)[: w.shape[0], : w.shape[1]]
    return values, scales


def _scales_of_blocks(
    scales: jax.Array, parts: int, axis_name: str, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """Scales of this shard's parts, those of their blocks; and of all blocks of the whole matrix.

    Args:
      scales: what the parts would have for scales of their own, float32 [n, k].
      parts: the number of parts of a block, in the dimension that the axis shards.
      axis_name: the axis.
      dimension: the dimension.
    """
    whole = lax.all_gather(scales, axis_name, axis=dimension, tiled=True)
    blocks = jnp.max(divided_into_blocks(whole, dimension, parts), axis=dimension + 1)
    size = scales.shape[dimension]
    of_parts = spread(blocks, whole.shape[dimension], dimension, parts)
    first = axis_index(axis_name) * size
    return lax.dynamic_slice_in_dim(of_parts, first, size, dimension), blocks
