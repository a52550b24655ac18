"""`ScaledMatrix`: a weight in 8 bits with scales of its columns or blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.scaled import scaled_chunks
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaling import as_row, spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledMatrix:
    """A weight [K, N] in 8 bits: a `Matrix`, to be multiplied with `PackedRows`.

    Of a weight that a mesh axis shards, it may have the values of a shard, and the scales of the
    whole.

    Attributes:
      values: [N, K], contracted along the last dimension as Hopper's tensor cores want it.
      scales: float32, one of each column [N], or of each block [ceil(N / 128), ceil(K / 128)].
      product_dtype: dtype of the products.
    """

    values: jax.Array
    scales: jax.Array
    product_dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        columns, contracted = self.values.shape[-2:]
        return contracted, columns

    @property
    def in_blocks(self) -> bool:
        """Whether blocks have the scales, not columns."""
        return self.scales.ndim == self.values.ndim

    def gathered(self, axis_name: str, dimension: int) -> ScaledMatrix:
        """The whole weight [K, N] of a shard along a dimension, which `axis_name` shards."""
        values = lax.all_gather(self.values, axis_name, axis=1 - dimension, tiled=True)
        return dataclasses.replace(self, values=values)

    def multiply(self, rows: PackedRows) -> jax.Array:
        """The product [..., N] with rows [..., K]: by our kernel, or else by XLA."""
        product = scaled_chunks.multiply(rows, self)
        return self.multiply_in_xla(rows) if product is None else product

    def multiply_in_xla(self, rows: PackedRows) -> jax.Array:
        """The product. Scales of rows and columns multiply the float32 sums.

        XLA has no matmul with scales of blocks: there, it multiplies in float32.
        """
        ndim = rows.packed.ndim
        dimensions = (((ndim - 1,), (1,)), ((), ()))
        if not self.in_blocks:
            sums = lax.dot_general(
                rows.values, self.values, dimensions, preferred_element_type=jnp.float32
            )
            scaled = scaled_sums(sums, rows.scales, as_row(self.scales, ndim))
            return scaled.astype(self.product_dtype)
        # For GPUs, XLA drops a rounding to 8 bits whose result is widened in the same program.
        rows, w = lax.optimization_barrier((rows, self))
        return lax.dot_general(
            rows.dequantized(),
            w.dequantized().T,
            dimensions,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).astype(self.product_dtype)

    @staticmethod
    def multiply_chunks(
        xs: Sequence[Rows],
        ws: Sequence[Sequence[ScaledMatrix]],
        outs: Sequence[Rows],
        *,
        dimension: int,
    ) -> tuple[jax.Array, ...] | None:
        """Multiplies chunks in place by our kernel; None if it cannot."""
        return scaled_chunks.multiply_chunks(xs, ws, outs, dimension=dimension)

    def dequantized(self) -> jax.Array:
        """The weight [K, N] that this stands for, float32."""
        contracted, columns = self.shape
        scales = self.scales[:, None]
        if self.in_blocks:
            scales = spread(spread(self.scales, columns, 0), contracted, 1)
        return (self.values.astype(jnp.float32) * scales).T


def scaled_sums(sums: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """``sums * row * column``, where nothing in between overflows unless the result does.

    A scale of rows above 1 comes after that of columns, which may be small. Others come before.
    """
    return sums * jnp.minimum(row, 1.0) * column * jnp.maximum(row, 1.0)


def transposed_values(values: jax.Array) -> jax.Array:
    """The transpose [K, N] of the values [N, K] of one matrix, made where it is used.

    XLA may otherwise choose another layout for the transposed array, and with it for the stacked
    layers of a scan: then it transposes all of them before the loop, and holds them twice.
    """
    return with_layout_constraint(values, Layout((0, 1))).T
