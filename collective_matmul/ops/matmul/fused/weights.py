"""Operands as the fused kernels take them: in half precision or in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from collective_matmul.mosaic_gpu import requirements
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK, ScaledParts
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from collective_matmul.ops.matmul.request import Site

#: A weight, as an array or in 8 bits; its leaves may be shapes and dtypes.
Weight = jax.Array | ScaledMatrix
AnyWeight = Weight | jax.ShapeDtypeStruct


def scaled_parts(w: AnyWeight) -> ScaledParts | None:
    """The parts of a weight that have scales; None in half precision."""
    if not isinstance(w, ScaledMatrix):
        return None
    return "blocks" if w.in_blocks else "rows"


def sizes_of(w: AnyWeight, transpose_w: bool) -> tuple[int, int]:
    """(K, N) of a weight, which is transposed if `transpose_w` and in half precision."""
    contracted, columns = w.shape
    if transpose_w and not isinstance(w, ScaledMatrix):
        return columns, contracted
    return contracted, columns


def array_of(x: Any) -> Any:
    """The array of an x that travels: itself, or its packed rows."""
    return x.packed if isinstance(x, PackedRows) else x


def contracted_axis(w: AnyWeight, transpose_w: bool) -> Any:
    """The contracted axis of a weight, counted from 1."""
    return 2 if transpose_w or isinstance(w, ScaledMatrix) else 1


def values_of(w: Weight) -> jax.Array:
    """The values of a weight: [1, K, N], or [1, N, K] if it is transposed or in 8 bits."""
    return (w.values if isinstance(w, ScaledMatrix) else w)[None]


def in_8_bits(ws: Sequence[Weight]) -> list[ScaledMatrix] | None:
    """The weights if they are in 8 bits, else None."""
    return cast(list[ScaledMatrix], list(ws)) if isinstance(ws[0], ScaledMatrix) else None


def operands_reason(devices: int, xs: Sequence[Any], ws: Sequence[AnyWeight]) -> str | None:
    """Why no kernel can multiply these operands on the devices of an axis; None if one can.

    Operands in 8 bits count as what they stand for.
    """

    def stands_for(array: Any, w: AnyWeight) -> jax.ShapeDtypeStruct:
        dtype = w.product_dtype if isinstance(w, ScaledMatrix) else array.dtype
        return jax.ShapeDtypeStruct(array.shape, dtype)

    pairs = zip(xs, ws, strict=True)
    plain = [stands_for(array, w) for x, w in pairs for array in (x, w)]
    return requirements.unsupported_reason(devices, *plain)


def operands_of(site: Site) -> tuple[list[Any], list[Any]]:
    """The shapes and dtypes of a site's xs and ws, as a backend gets them."""
    stored = site.format
    if stored == PLAIN:
        xs = [jax.ShapeDtypeStruct(x, site.dtype) for x, _ in site.operands]
        return xs, [
            jax.ShapeDtypeStruct(w[::-1] if site.transpose_w else w, site.dtype)
            for _, w in site.operands
        ]
    x_dtype, w_dtype = map(jnp.dtype, site.operand_dtypes)
    in_blocks = stored.scaled_parts == "blocks"

    def rows(x: tuple[int, ...]) -> PackedRows:
        columns = stored.row_bytes(x[-1], site.dtype.itemsize)
        packed = jax.ShapeDtypeStruct((*x[:-1], columns), jnp.uint8)
        return PackedRows(packed, None, x_dtype, BLOCK if in_blocks else None)

    def matrix(contracted: int, columns: int) -> ScaledMatrix:
        blocks = -(-columns // BLOCK), -(-contracted // BLOCK)
        arrays = ((columns, contracted), w_dtype), (blocks if in_blocks else (columns,), "float32")
        values, scales = (cast(Any, jax.ShapeDtypeStruct(*array)) for array in arrays)
        return ScaledMatrix(values, scales, jnp.dtype(site.dtype))

    return [rows(x) for x, _ in site.operands], [matrix(*w) for _, w in site.operands]


def wanted_sizes(w: AnyWeight, in_half_precision: str) -> str:
    """The sizes that a kernel wants, in words."""
    if isinstance(w, ScaledMatrix):
        return "K to be a multiple of 128 and the columns of 64"
    return in_half_precision
