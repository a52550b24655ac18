"""Matmuls walked chunk by chunk in lockstep.

A chunk is a slice of every x and of the result, along the gathered or scattered dimension. It is
multiplied by all weights, which may still be arriving during the first product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.chunked import empty_like
from collective_matmul.operands.multiply import (
    columns_of,
    multiplied,
    multiply_chunks,
    product_dtype,
)
from collective_matmul.schedule.schedules import Chunk
from collective_matmul.schedule.walk import Gather, Ring, walk_gather, walk_scatter

#: Makes the chunks that a product is written to, for those who need them.
Places = Callable[[], Sequence[Rows]]


class Weights(Protocol):
    """The weights of a walk, each [K, N] or, transposed, [N, K].

    Attributes:
      arrays: the weights, or this device's shards of them.
      columns: N of each weight.
    """

    arrays: Sequence[Any]
    columns: Sequence[int]

    def begin(
        self, xs: Sequence[Rows], outs: Places, dimension: int, waiting: Any
    ) -> tuple[Sequence[Rows], Any]:
        """Computes all that is possible before the last weights are here.

        Args:
          xs: the first chunks to multiply, as for `multiply`, which is called with them next.
          outs: makes the chunks that their product will be written to.
          dimension: the dimension that is divided into chunks.
          waiting: arrays that are not to be sent before.

        Returns:
          xs and `waiting`, to use from then on.
        """
        ...

    def multiply(
        self, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """Multiplies chunks [..., rows, ..., K] and writes chunks [..., rows, ..., N] of `outs`.

        Either there is one x, and each weight has a result; or there is one result, the sum over
        pairs of an x and a weight.

        Returns:
          The arrays of outs.
        """
        ...


class WholeWeights(Weights):
    """Weights that this device has whole."""

    def __init__(self, ws: Sequence[Any], *, transpose_w: bool):
        self.arrays = ws
        self.columns = [columns_of(w, transpose_w) for w in ws]
        self._transpose_w = transpose_w

    def begin(
        self, xs: Sequence[Rows], outs: Places, dimension: int, waiting: Any
    ) -> tuple[Sequence[Rows], Any]:
        """Nothing: all weights are here."""
        del outs, dimension
        return xs, waiting

    def multiply(
        self, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """See `Weights`."""
        terms = [self.arrays] if len(xs) == 1 else [[w] for w in self.arrays]
        return multiply_chunks(xs, terms, outs, dimension=dimension, transpose_w=self._transpose_w)


def gather_matmul(gather: Gather, x: Any, weights: Weights) -> tuple[jax.Array, ...]:
    """Multiplies the shards of x, which `gather` gathers, by every weight as they arrive."""
    dimension = gather.dimension
    whole = {dimension: gather.rows * gather.devices}

    def places(chunk: Chunk, outs: Sequence[jax.Array]) -> list[Rows]:
        return [Rows(out, gather.start(chunk), gather.size(chunk)) for out in outs]

    def multiply(chunk: Chunk, shard: Any, _: Any, outs: Any) -> tuple[jax.Array, ...]:
        here = Rows(multiplied(shard), 0, gather.size(chunk))
        return weights.multiply([here], places(chunk, outs), dimension)

    array = jax.tree.leaves(x)[0]
    outs = tuple(
        empty_like(array, whole | {array.ndim - 1: n}, w, dtype=product_dtype(x, w))
        for n, w in zip(weights.columns, weights.arrays, strict=True)
    )
    first = gather.steps[0].multiply[0]
    here = Rows(gather.held.pop(first), 0, gather.size(first))
    (here,), waiting = weights.begin([here], lambda: places(first, outs), dimension, gather.held)
    gather.hold(waiting | {first: here.array})
    return walk_gather(gather, multiply, (), outs)


def matmul_scatter(
    scatter: Ring, gather: Gather | None, xs: Sequence[Any], weights: Weights
) -> jax.Array:
    """Sums the chunks while their accumulators travel, and the shards of `gather` beside them."""
    dimension, columns = scatter.dimension, weights.columns[0]
    first_array, *others = jax.tree.leaves(xs)

    def operands(chunk: Chunk, xs: Sequence[Any]) -> list[Rows]:
        return [Rows(x, scatter.start(chunk), scatter.size(chunk)) for x in xs]

    def product_of(chunk: Chunk) -> list[Rows]:
        size = scatter.size(chunk)
        sizes = {dimension: size, first_array.ndim - 1: columns}
        dtype = product_dtype(xs[0], weights.arrays[0])
        empty = empty_like(first_array, sizes, *others, *weights.arrays, dtype=dtype)
        return [Rows(empty, 0, size)]

    def multiply(chunk: Chunk, xs: Sequence[Any]) -> jax.Array:
        (product,) = weights.multiply(operands(chunk, xs), product_of(chunk), dimension)
        return product

    first = scatter.steps[0].multiply[0]
    waiting = {} if gather is None else gather.held
    makes = functools.partial(product_of, first)
    places, waiting = weights.begin(operands(first, xs), makes, dimension, waiting)
    if gather is not None:
        gather.hold(waiting)
    return walk_scatter(scatter, gather, multiply, [place.array for place in places])
