"""`PackedRows`: rows in 8 bits with their scales, in one array that one transfer moves.

That is an array of bytes, the rounded numbers and their scales::

    uint8 [..., M, K + bytes of scales]    the row's K values, and then the bytes of its scales

It can be divided into chunks along every dimension but the last, and gathered like any other array.
It is an array of bytes because compilers may replace one NaN by another, and bytes of a scale can
look like one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul.operands.scaled.scaling import spread

#: The scales of a row take a multiple of this: so rows are whole tiles, as our kernels read them.
_ALIGNMENT = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Rows [..., K] in 8 bits.

    Attributes:
      packed: uint8 [..., M, K + bytes of scales]; None if only the array was gathered.
      array: the rows as they were, [..., M, K], where a weight gradient needs them; else None.
      dtype: dtype of the values.
      block: how many numbers of a row have a scale in common; None if the whole row has one.
    """

    packed: Any
    array: Any
    dtype: jnp.dtype = field(metadata={"static": True})
    block: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., M, K]."""
        if self.packed is None:
            return self.array.shape
        *rows, size = self.packed.shape
        # More scales fill more units, of which each K has one number.
        columns = next(k for k in range(size - _ALIGNMENT, 0, -_ALIGNMENT) if self._fills(k, size))
        return (*rows, columns)

    def _fills(self, columns: int, size: int) -> bool:
        return columns + scale_bytes(scales_of_row(columns, self.block)) == size

    @property
    def values(self) -> jax.Array:
        """[..., M, K], of `dtype`."""
        raw = lax.slice_in_dim(self.packed, 0, self.shape[-1], axis=-1)
        return lax.bitcast_convert_type(raw, self.dtype)

    @property
    def loaded(self) -> jax.Array:
        """[..., M, K + bytes of scales], as kernels load values. The rest is not read."""
        return lax.bitcast_convert_type(self.packed, self.dtype)

    @property
    def scales(self) -> jax.Array:
        """float32 [..., M, scales of a row]."""
        columns = self.shape[-1]
        count = scales_of_row(columns, self.block)
        raw = lax.slice_in_dim(self.packed, columns, columns + 4 * count, axis=-1)
        return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], count, 4), jnp.float32)

    @property
    def without_array(self) -> PackedRows:
        """The rows without their array."""
        return dataclasses.replace(self, array=None)

    def dequantized(self) -> jax.Array:
        """The numbers [..., M, K] that the rows stand for, float32."""
        scales = self.scales
        if self.block is not None:
            scales = spread(scales, self.shape[-1], -1, self.block)
        return self.values.astype(jnp.float32) * scales


def pack(
    values: jax.Array, scales: jax.Array, *, block: int | None = None, array: Any = None
) -> PackedRows:
    """The rows of values [..., K] and scales [..., S], float32.

    If a row has one scale, copies fill the bytes behind it; else zeros do.
    """
    own, filled = scales.shape[-1], scale_bytes(scales.shape[-1]) // scales.itemsize
    if own == 1:
        # Unlike padding, XLA writes copies in the kernel that computes the values.
        scales = jnp.broadcast_to(scales, (*scales.shape[:-1], filled))
    else:
        # Not by jnp.pad: see `collective_matmul.operands.scaled.scaling`.
        widths = [*[(0, 0, 0)] * (scales.ndim - 1), (0, filled - own, 0)]
        scales = lax.pad(scales, np.zeros((), scales.dtype), widths)
    raw = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*scales.shape[:-1], -1)
    packed = lax.concatenate([lax.bitcast_convert_type(values, jnp.uint8), raw], values.ndim - 1)
    return PackedRows(packed, array, jnp.dtype(values.dtype), block)


def scales_of_row(columns: int, block: int | None) -> int:
    """The number of scales of a row of K = `columns` numbers."""
    return 1 if block is None else -(-columns // block)


def scale_bytes(scales: int) -> int:
    """The bytes at the end of each row of packed rows that has this number of scales."""
    return -(-4 * scales // _ALIGNMENT) * _ALIGNMENT
