"""`Chunked`: a gathered operand as the chunks that arrived; and chunks of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.explicit_axes import with_type_of
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows


@jax.tree_util.register_dataclass
@dataclass
class Chunked:
    """A gathered operand as the chunks that arrived.

    Attributes:
      chunks: arrays [..., size, ..., columns], or pytrees of such; together they are the whole.
      starts: the first row of each chunk in the whole.
    """

    chunks: list[Any]
    starts: list[jax.Array]

    def whole(self, dimension: int) -> Any:
        """The chunks in one array, or pytree of arrays, in the order of their starts."""

        def joined(*chunks: jax.Array) -> jax.Array:
            rows = sum(chunk.shape[dimension] for chunk in chunks)
            whole = empty_like(chunks[0], {dimension: rows})
            for chunk, start in zip(chunks, self.starts, strict=True):
                whole = write(Rows(whole, start, chunk.shape[dimension]), chunk, dimension)
            return whole

        return jax.tree.map(joined, *self.chunks)


#: What a gather returns beside its products: the gathered operand whole, in chunks, or not at all.
Gathered = Any


def whole_of(gathered: Gathered, dimension: int | None) -> Any:
    """An operand, whole: chunks are joined along `dimension`."""
    assert gathered is not None
    if not isinstance(gathered, Chunked):
        return gathered
    assert dimension is not None
    return gathered.whole(dimension)


def read(chunk: Rows, dimension: int) -> Any:
    """The chunk as an operand of its own."""
    return jax.tree.map(lambda array: _read(chunk._replace(array=array), dimension), chunk.array)


def _read(chunk: Rows, dimension: int) -> jax.Array:
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


def tie_with_barrier(gathered: Gathered, *results: Any) -> tuple[Any, ...]:
    """Returns the results; if they were computed from chunks, no result is used before all exist.

    XLA postpones weight gradients, since nothing waits for them, and until then their chunks would
    occupy memory.
    """
    if not isinstance(gathered, Chunked):
        return results
    return lax.optimization_barrier(results)
