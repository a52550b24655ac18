"""The matmul for rows, weights and a destination: in place by a kernel if it can, or by XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from collective_matmul.mosaic_gpu.hopper_matmul import chunk_matmul
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.arithmetic import add, contract_rows
from collective_matmul.operands.chunked import Chunked, read, whole_of, write
from collective_matmul.operands.format import Format


def matmul(rows: Any, w: Any, transpose_w: bool = False) -> jax.Array:
    """Multiplies rows [..., K] by w [K, N] -> [..., N], accumulated in float32.

    An array w is [N, K] with `transpose_w`; other formats are never transposed. XLA accumulates
    half-precision matmuls in float32 on CPUs and GPUs and rounds once.
    """
    if not is_array(w):
        return w.multiply(rows)
    dimensions = (((rows.ndim - 1,), (1 if transpose_w else 0,)), ((), ()))
    return lax.dot_general(rows, w, dimensions)


def product_dtype(rows: Any, w: Any) -> Any:
    """The dtype of the product of rows and w."""
    return rows.dtype if is_array(w) else w.product_dtype


def columns_of(w: Any, transpose_w: bool) -> int:
    """N of a weight."""
    return w.shape[0 if transpose_w and is_array(w) else 1]


def is_array(operand: Any) -> bool:
    """Whether an operand is stored as an array."""
    return isinstance(operand, jax.Array | np.ndarray)


def multiplied(rows: Any) -> Any:
    """The part of rows that a matmul reads."""
    return rows if is_array(rows) else rows.without_array


def contracted(rows: Any) -> Any:
    """The part of rows, or of chunks, that a weight gradient reads: their array if they have it."""
    if isinstance(rows, Chunked):
        return Chunked([contracted(chunk) for chunk in rows.chunks], rows.starts)
    return rows if is_array(rows) or rows.array is None else rows.array


def multiply_chunks(
    xs: Sequence[Rows],
    ws: Sequence[Sequence[Any]],
    outs: Sequence[Rows],
    *,
    dimension: int,
    transpose_w: bool,
) -> tuple[jax.Array, ...]:
    """Writes ``sum over p of xs[p] @ ws[p][q]`` into the chunk `outs[q]`, in place where it can.

    Args:
      xs: chunks of rows [..., rows, ..., K_p], in any format.
      ws: ws[p][q] is [K_p, N_q] in that format; an array is [N_q, K_p] if `transpose_w`.
      outs: chunks of arrays [..., rows, ..., N_q], of the same size as those in xs.
      dimension: the dimension that is divided into chunks, in xs and outs.
      transpose_w: whether arrays are contracted along their last dimension.

    Returns:
      The arrays of outs.
    """
    first = ws[0][0]
    if is_array(first):
        written = chunk_matmul.multiply_chunks(
            xs, ws, outs, dimension=dimension, transpose_w=transpose_w
        )
    else:
        written = type(first).multiply_chunks(xs, ws, outs, dimension=dimension)
    if written is not None:
        return written
    operands = [read(x, dimension) for x in xs]
    arrays = []
    for q, out in enumerate(outs):
        products = [matmul(x, term[q], transpose_w) for x, term in zip(operands, ws, strict=True)]
        arrays.append(write(out, add(*products), dimension))
    return tuple(arrays)


#: A block of columns, and the number of equal blocks that the columns are divided into.
ColumnBlock = tuple[Any, int]
_ALL_COLUMNS: ColumnBlock = (0, 1)


def contract(
    x: jax.Array | Chunked,
    ys: Sequence[jax.Array | Chunked],
    *,
    dimension: int | None,
    x_block: ColumnBlock = _ALL_COLUMNS,
    y_block: ColumnBlock = _ALL_COLUMNS,
) -> tuple[jax.Array, ...]:
    """``xᵀ y`` for each y, contracted over all rows: [K, N].

    Args:
      x: [..., rows, ..., K].
      ys: each [..., rows, ..., N].
      dimension: the one that chunks divide; None if neither x nor the only y is in chunks.
      x_block: the block of x's columns to use.
      y_block: the same for each y.
    """
    gathered = x if isinstance(x, Chunked) else ys[0]
    divided = x_block is not _ALL_COLUMNS or y_block is not _ALL_COLUMNS
    if isinstance(gathered, Chunked) or divided:
        assert dimension is not None
        xs = _chunks_of(x, gathered, dimension, x_block)
        terms = zip(*(_chunks_of(y, gathered, dimension, y_block) for y in ys), strict=True)
        products = chunk_matmul.contract_chunks(xs, list(terms), dimension=dimension)
        if products is not None:
            return products
    x, *ys = (whole_of(array, dimension) for array in (x, *ys))
    x, *ys = (_columns_of(x, x_block), *(_columns_of(y, y_block) for y in ys))
    return tuple(contract_rows(x, y) for y in ys)


def weight_gradients(
    stored: Format,
    xs: Sequence[Any],
    ys: Sequence[Any],
    dtype: Any,
    *,
    shards: int,
    dimension: int | None,
) -> tuple[jax.Array, ...]:
    """``xᵀ y`` [K, N] of each pair of rows in a format, contracted over all rows.

    Args:
      stored: the format.
      xs: rows [..., K]; one for all ys, or as many as there are ys or one of them.
      ys: rows [..., N]; some rows may be `Chunked`.
      dtype: dtype of the results.
      shards: how many devices' rows follow each other in gathered rows.
      dimension: the dimension along which they do; None if nothing was gathered.
    """
    xs, ys = ([contracted(rows) for rows in each] for each in (xs, ys))
    if stored.packs_gradients:
        xs, ys = ([whole_of(rows, dimension) for rows in each] for each in (xs, ys))
        options = {"shards": shards, "dimension": dimension or 0}
        return tuple(stored.weight_gradients(xs, ys, dtype, **options))
    if len(xs) == 1:
        return contract(xs[0], ys, dimension=dimension)
    pairs = zip(xs, ys if len(ys) > 1 else ys * len(xs), strict=True)
    return tuple(contract(x, [y], dimension=dimension)[0] for x, y in pairs)


def _columns_of(array: Any, block: ColumnBlock) -> jax.Array:
    return read(Rows(array, 0, array.shape[0], *block), 0)


def _chunks_of(
    array: jax.Array | Chunked,
    gathered: jax.Array | Chunked,
    dimension: int,
    block: ColumnBlock,
) -> list[Rows]:
    """The chunks of an array that correspond to those of `gathered`, in its order."""
    if not isinstance(gathered, Chunked):
        assert not isinstance(array, Chunked)
        return [Rows(array, 0, array.shape[dimension], *block)]
    sizes = [chunk.shape[dimension] for chunk in gathered.chunks]
    if isinstance(array, Chunked):
        return [
            Rows(chunk, 0, size, *block) for chunk, size in zip(array.chunks, sizes, strict=True)
        ]
    return [Rows(array, *place, *block) for place in zip(gathered.starts, sizes, strict=True)]
