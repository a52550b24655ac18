"""Matmuls walked chunk by chunk in lockstep.

A chunk is a slice of every x and of the result, along the gathered or scattered dimension. It is
multiplied by all weights, which may still be arriving during the first product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from collective_matmul.backends.arithmetic import Weight, product_dtype
from collective_matmul.backends.chunked_array import empty_like, multiply_chunks
from collective_matmul.backends.ring.schedule import Chunk
from collective_matmul.backends.ring.walk import Gather, Ring, walk_gather, walk_scatter
from collective_matmul.mosaic_gpu.chunk_matmul import Rows

#: Makes the chunks that a product is written to, for those who need them.
Places = Callable[[], Sequence[Rows]]


class Weights(Protocol):
    """The weights of a walk, each [K, N] or, transposed, [N, K].

    Attributes:
      arrays: the weights, or this device's shards of them.
      columns: N of each weight.
    """

    arrays: Sequence[Weight]
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

    def __init__(self, ws: Sequence[Weight], *, transpose_w: bool):
        self.arrays = ws
        self.columns = [w.shape[0 if transpose_w else 1] for w in ws]
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


def gather_matmul(
    gather: Gather, x: jax.Array, weights: Weights, beside: Gather | None = None
) -> tuple[jax.Array, ...]:
    """Multiplies the shards of x, which `gather` gathers, by every weight as they arrive.

    Shards of `beside` travel in the same steps.
    """
    dimension = gather.dimension
    whole = {dimension: gather.rows * gather.devices}

    def places(chunk: Chunk, outs: Sequence[jax.Array]) -> list[Rows]:
        return [Rows(out, gather.start(chunk), gather.size(chunk)) for out in outs]

    def multiply(chunk: Chunk, shard: jax.Array, _: Any, outs: Any) -> tuple[jax.Array, ...]:
        here = Rows(shard, 0, gather.size(chunk))
        return weights.multiply([here], places(chunk, outs), dimension)

    outs = tuple(
        empty_like(x, whole | {x.ndim - 1: n}, w, dtype=product_dtype(x, w))
        for n, w in zip(weights.columns, weights.arrays, strict=True)
    )
    first = gather.steps[0].multiply[0]
    here = Rows(gather.held.pop(first), 0, gather.size(first))
    (here,), waiting = weights.begin([here], lambda: places(first, outs), dimension, gather.held)
    gather.hold(waiting | {first: here.array})
    return walk_gather(gather, multiply, (), outs, beside)


def matmul_scatter(
    scatter: Ring, gather: Gather | None, xs: Sequence[jax.Array], weights: Weights
) -> jax.Array:
    """Sums the chunks while their accumulators travel, and the shards of `gather` beside them."""
    dimension, columns = scatter.dimension, weights.columns[0]

    def operands(chunk: Chunk, xs: Sequence[jax.Array]) -> list[Rows]:
        return [Rows(x, scatter.start(chunk), scatter.size(chunk)) for x in xs]

    def product_of(chunk: Chunk) -> list[Rows]:
        size = scatter.size(chunk)
        sizes = {dimension: size, xs[0].ndim - 1: columns}
        dtype = product_dtype(xs[0], weights.arrays[0])
        return [Rows(empty_like(xs[0], sizes, *xs[1:], *weights.arrays, dtype=dtype), 0, size)]

    def multiply(chunk: Chunk, xs: Sequence[jax.Array]) -> jax.Array:
        (product,) = weights.multiply(operands(chunk, xs), product_of(chunk), dimension)
        return product

    first = scatter.steps[0].multiply[0]
    waiting = {} if gather is None else gather.held
    makes = functools.partial(product_of, first)
    places, waiting = weights.begin(operands(first, xs), makes, dimension, waiting)
    if gather is not None:
        gather.hold(waiting)
    return walk_scatter(scatter, gather, multiply, [place.array for place in places])
