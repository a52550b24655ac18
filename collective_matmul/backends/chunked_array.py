"""Arrays in chunks, and matmuls of chunks: in place by our kernel, or by XLA with copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.backends.arithmetic import Weight, add, contract_rows, matmul
from collective_matmul.explicit_axes import with_type_of
from collective_matmul.fp8 import ScaledMatrix
from collective_matmul.mosaic_gpu import chunk_matmul, scaled_chunks
from collective_matmul.mosaic_gpu.chunk_matmul import Rows


def multiply_chunks(
    xs: Sequence[Rows],
    ws: Sequence[Sequence[Weight]],
    outs: Sequence[Rows],
    *,
    dimension: int,
    transpose_w: bool,
) -> tuple[jax.Array, ...]:
    """Writes ``sum over p of xs[p] @ ws[p][q]`` into the chunk `outs[q]`.

    Shapes are those of `collective_matmul.mosaic_gpu.chunk_matmul.multiply_chunks`.

    Returns:
      The arrays of outs.
    """
    if isinstance(ws[0][0], ScaledMatrix):
        scaled = cast(Sequence[Sequence[ScaledMatrix]], ws)
        written = scaled_chunks.multiply_chunks(xs, scaled, outs, dimension=dimension)
    else:
        arrays = cast(Sequence[Sequence[jax.Array]], ws)
        written = chunk_matmul.multiply_chunks(
            xs, arrays, outs, dimension=dimension, transpose_w=transpose_w
        )
    if written is not None:
        return written
    operands = [read(x, dimension) for x in xs]
    arrays = []
    for q, out in enumerate(outs):
        products = [matmul(x, term[q], transpose_w) for x, term in zip(operands, ws, strict=True)]
        arrays.append(write(out, add(*products), dimension))
    return tuple(arrays)


@jax.tree_util.register_dataclass
@dataclass
class ChunkedArray:
    """A gathered array as the chunks that arrived.

    Attributes:
      chunks: arrays [..., size, ..., columns]; together they are the whole.
      starts: the first row of each chunk in the whole array.
    """

    chunks: list[jax.Array]
    starts: list[jax.Array]

    def whole(self, dimension: int) -> jax.Array:
        """The chunks in one array, in the order of their starts."""
        rows = sum(chunk.shape[dimension] for chunk in self.chunks)
        whole = empty_like(self.chunks[0], {dimension: rows})
        for chunk, start in zip(self.chunks, self.starts, strict=True):
            whole = write(Rows(whole, start, chunk.shape[dimension]), chunk, dimension)
        return whole


#: A block of columns, and the number of equal blocks that the columns are divided into.
ColumnBlock = tuple[Any, int]
_ALL_COLUMNS: ColumnBlock = (0, 1)


def weight_gradients(
    x: jax.Array | ChunkedArray,
    ys: Sequence[jax.Array | ChunkedArray],
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
    gathered = x if isinstance(x, ChunkedArray) else ys[0]
    divided = x_block is not _ALL_COLUMNS or y_block is not _ALL_COLUMNS
    if isinstance(gathered, ChunkedArray) or divided:
        assert dimension is not None
        xs = _chunks_of(x, gathered, dimension, x_block)
        terms = zip(*(_chunks_of(y, gathered, dimension, y_block) for y in ys), strict=True)
        products = chunk_matmul.contract_chunks(xs, list(terms), dimension=dimension)
        if products is not None:
            return products
    x, *ys = (whole_of(array, dimension) for array in (x, *ys))
    x, *ys = (_columns_of(x, x_block), *(_columns_of(y, y_block) for y in ys))
    return tuple(contract_rows(x, y) for y in ys)


def _columns_of(array: jax.Array, block: ColumnBlock) -> jax.Array:
    return read(Rows(array, 0, array.shape[0], *block), 0)


def whole_of(array: jax.Array | ChunkedArray | None, dimension: int | None) -> jax.Array:
    """An array, whole: chunks, if it is in chunks, are joined along `dimension`."""
    assert array is not None
    if not isinstance(array, ChunkedArray):
        return array
    assert dimension is not None
    return array.whole(dimension)


def _chunks_of(
    array: jax.Array | ChunkedArray,
    gathered: jax.Array | ChunkedArray,
    dimension: int,
    block: ColumnBlock,
) -> list[Rows]:
    """The chunks of an array that correspond to those of `gathered`, in its order."""
    if not isinstance(gathered, ChunkedArray):
        assert not isinstance(array, ChunkedArray)
        return [Rows(array, 0, array.shape[dimension], *block)]
    sizes = [chunk.shape[dimension] for chunk in gathered.chunks]
    if isinstance(array, ChunkedArray):
        return [
            Rows(chunk, 0, size, *block) for chunk, size in zip(array.chunks, sizes, strict=True)
        ]
    return [Rows(array, *place, *block) for place in zip(gathered.starts, sizes, strict=True)]


def read(chunk: Rows, dimension: int) -> jax.Array:
    """The chunk as an array of its own."""
    array, columns = chunk.array, chunk.columns
    if chunk.column_blocks > 1:
        array = lax.dynamic_slice_in_dim(array, chunk.column_block * columns, columns, -1)
    if array.shape[dimension] == chunk.size:
        return array
    return lax.dynamic_slice_in_dim(array, chunk.start, chunk.size, dimension)


def write(chunk: Rows, value: jax.Array, dimension: int) -> jax.Array:
    """The chunk's array with `value` in its place."""
    array = chunk.array
    if array.shape == value.shape:
        return value
    # Places are int32, as axis indices are; with JAX_ENABLE_X64, Python's 0 would be an int64.
    start: list[Any] = [np.int32(0)] * array.ndim
    if array.shape[dimension] > chunk.size:
        start[dimension] = chunk.start
    if chunk.column_blocks > 1:
        start[-1] = chunk.column_block * chunk.columns
    return lax.dynamic_update_slice(array, value, start)


def empty_like(
    array: jax.Array, sizes: dict[int, int], *others: Any, dtype: Any = None
) -> jax.Array:
    """An uninitialized array: `array`'s shape except for `sizes`, varying over the axes of all."""
    shape = [sizes.get(i, size) for i, size in enumerate(array.shape)]
    axes = frozenset().union(*map(varying_axes, (array, *jax.tree.leaves(others))))
    empty = lax.empty(tuple(shape), array.dtype if dtype is None else dtype)
    return with_type_of(array, vary_over(empty, axes))
