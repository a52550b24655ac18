"""Rings whose weights are sharded over a second mesh axis.

T devices are on the axis of the ring, F on that of the weights. A weight's shards come straight
from their owners, while the first chunk of the ring is multiplied by those that are there already;
the other chunks find them all. With T = 1, as in fully sharded data parallelism without tensor
parallelism, that first chunk is all there is.

In a backward pass with T = 1 the weight gradient comes first. Under its products travel the shards,
which the gradient of x needs, and the finished terms of the weight gradient, each to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul.backends.arithmetic import add
from collective_matmul.backends.chunked_array import ChunkedArray, empty_like, write
from collective_matmul.backends.ring.schedule import Chunk, Pattern
from collective_matmul.backends.ring.walk import Gather, Ring, walk_gather, walk_scatter
from collective_matmul.backends.weight_blocks import (
    Blocks,
    ShardedWeights,
    multiply_blocks,
    weight_gradients,
)
from collective_matmul.mosaic_gpu.chunk_matmul import Rows

Gradients = tuple[jax.Array, tuple[jax.Array, ...]]


class WeightGather(Gather):
    """A running gather of weights. Its chunks are the shards of all weights of one device."""

    def __init__(self, weights: ShardedWeights, *, co_gathered: bool = False):
        sharding = weights.sharding
        Ring.__init__(self, "gather", "direct", sharding.axis_name, sharding.dimension, rows=1)
        self.co_gathered = co_gathered
        self.held = {Chunk(0, 0): weights.shards}
        self._arrived = dict(self.held)

    def number(self, chunk: Chunk) -> Any:
        """The number of a chunk's block, which is that of its owner."""
        return self.start(chunk)

    def blocks(self) -> Blocks:
        """All blocks that have arrived, this device's own first."""
        return [(self.number(chunk), self._arrived[chunk]) for chunk in sorted(self._arrived)]


class ArrivingWeights:
    """Weights that arrive while the first product with them is computed."""

    def __init__(self, weights: ShardedWeights):
        self._weights = weights
        self._blocks: Blocks | None = None

    def multiply(
        self, xs: Sequence[Rows], outs: Sequence[Rows], *, dimension: int, transpose_w: bool = False
    ) -> tuple[jax.Array, ...]:
        """The arrays of `outs`, with the products of xs and the weights in their chunks.

        See `multiply_blocks`. Call it first with what is there first.
        """
        options: dict[str, Any] = {"dimension": dimension, "transpose_w": transpose_w}
        if self._blocks is not None:
            return multiply_blocks(self._weights, self._blocks, xs, outs, **options)
        gather = WeightGather(self._weights)
        # Shards wait for x. Else all weights of a program could be gathered at its start.
        tied = gather.held, [x.array for x in xs]
        gather.held, arrays = lax.optimization_barrier(tied)
        xs = [x._replace(array=array) for x, array in zip(xs, arrays, strict=True)]
        if self._weights.divides_columns(transpose_w):
            results = self._columns_as_they_arrive(gather, xs, outs, options)
        else:
            results = self._sum_in_two_parts(gather, xs, outs, options)
        self._blocks = gather.blocks()
        return results

    def _columns_as_they_arrive(
        self, gather: WeightGather, xs: Sequence[Rows], outs: Sequence[Rows], options: Any
    ) -> tuple[jax.Array, ...]:
        """Each block of columns is a product of its own."""

        def multiply(chunk: Chunk, shards: Any, _: Any, arrays: Any) -> Any:
            places = [out._replace(array=a) for out, a in zip(outs, arrays, strict=True)]
            block = gather.number(chunk), shards
            return multiply_blocks(self._weights, [block], xs, places, **options)

        return walk_gather(gather, multiply, (), tuple(out.array for out in outs))

    def _sum_in_two_parts(
        self, gather: WeightGather, xs: Sequence[Rows], outs: Sequence[Rows], options: Any
    ) -> tuple[jax.Array, ...]:
        """The term of the own shard, while all others arrive; then their sum, in one product."""
        for i, step in enumerate(gather.steps):
            gather.receive(i, gather.send(step))
        own, *others = gather.blocks()
        if not others:
            return multiply_blocks(self._weights, [own], xs, outs, **options)
        dimension = options["dimension"]
        parts = [Rows(empty_like(o.array, {dimension: o.size}), 0, o.size) for o in outs]
        first = multiply_blocks(self._weights, [own], xs, parts, **options)
        others, first = lax.optimization_barrier((others, first))
        rest = multiply_blocks(self._weights, others, xs, parts, **options)
        sums = map(add, first, rest)
        return tuple(write(out, total, dimension) for out, total in zip(outs, sums, strict=True))


def gather_matmul(
    x: jax.Array, weights: ShardedWeights, pattern: Pattern, axis_name: str, dimension: int
) -> tuple[jax.Array, ...]:
    """See `ShardedWeightBackend.gather_with_shards`."""
    gather = Gather(x, pattern, axis_name, dimension)
    arriving = ArrivingWeights(weights)
    outs = tuple(
        _product(x, {dimension: x.shape[dimension] * gather.devices}, w.shape[1], weights)
        for w in weights.whole
    )

    def multiply(chunk: Chunk, shard: jax.Array, _: Any, outs: Any) -> Any:
        here = Rows(shard, 0, gather.size(chunk))
        places = [Rows(out, gather.start(chunk), here.size) for out in outs]
        return arriving.multiply([here], places, dimension=dimension)

    return walk_gather(gather, multiply, (), outs)


def gather_matmul_gradients(
    x: jax.Array,
    weights: ShardedWeights,
    dys: Sequence[jax.Array],
    pattern: Pattern,
    axis_name: str,
    dimension: int,
) -> Gradients:
    """See `ShardedWeightBackend.gather_with_shards_gradients`."""
    features = x.shape[-1]
    if lax.axis_size(axis_name) == 1:
        dws, blocks = scatter_weight_gradients(weights, x, dys, dimension, gathers=True)
        rows = [_all_rows(dy, dimension) for dy in dys]
        out = _all_rows(_product(dys[0], {}, features, weights), dimension)
        (dx,) = multiply_blocks(weights, blocks, rows, [out], dimension=dimension, transpose_w=True)
        return dx, dws
    scatter = Ring("scatter", pattern, axis_name, dimension, x.shape[dimension])
    gather = Gather(x, pattern, axis_name, dimension, co_gathered=True)
    arriving = ArrivingWeights(weights)

    def multiply(chunk: Chunk, dys: Sequence[jax.Array]) -> jax.Array:
        size = scatter.size(chunk)
        places = [Rows(dy, scatter.start(chunk), size) for dy in dys]
        out = Rows(_product(dys[0], {dimension: size}, features, weights), 0, size)
        (product,) = arriving.multiply(places, [out], dimension=dimension, transpose_w=True)
        return product

    dx = walk_scatter(scatter, gather, multiply, dys)
    dws, _ = scatter_weight_gradients(weights, gather.gathered(), dys, dimension)
    return dx, dws


def matmul_scatter(
    x: jax.Array, weights: ShardedWeights, pattern: Pattern, axis_name: str, dimension: int
) -> jax.Array:
    """See `ShardedWeightBackend.scatter_with_shards`."""
    rows = x.shape[dimension] // lax.axis_size(axis_name)
    scatter = Ring("scatter", pattern, axis_name, dimension, rows)
    arriving = ArrivingWeights(weights)
    columns = weights.whole[0].shape[1]

    def multiply(chunk: Chunk, x: jax.Array) -> jax.Array:
        size = scatter.size(chunk)
        out = Rows(_product(x, {dimension: size}, columns, weights), 0, size)
        place = Rows(x, scatter.start(chunk), size)
        (product,) = arriving.multiply([place], [out], dimension=dimension)
        return product

    return walk_scatter(scatter, None, multiply, x)


def matmul_scatter_gradients(
    x: jax.Array,
    weights: ShardedWeights,
    dy: jax.Array,
    pattern: Pattern,
    axis_name: str,
    dimension: int,
) -> Gradients:
    """See `ShardedWeightBackend.scatter_with_shards_gradients`."""
    if lax.axis_size(axis_name) == 1:
        return gather_matmul_gradients(x, weights, [dy], pattern, axis_name, dimension)
    gather = Gather(dy, pattern, axis_name, dimension)
    arriving = ArrivingWeights(weights)
    whole = {dimension: dy.shape[dimension] * gather.devices}

    def multiply(chunk: Chunk, shard: jax.Array, _: Any, dx: jax.Array) -> jax.Array:
        here = Rows(shard, 0, gather.size(chunk))
        place = Rows(dx, gather.start(chunk), here.size)
        (dx,) = arriving.multiply([here], [place], dimension=dimension, transpose_w=True)
        return dx

    dx = walk_gather(gather, multiply, (), _product(dy, whole, x.shape[-1], weights))
    dws, _ = scatter_weight_gradients(weights, x, [gather.gathered()], dimension)
    return dx, dws


def scatter_weight_gradients(
    weights: ShardedWeights,
    x: jax.Array | ChunkedArray,
    ys: Sequence[jax.Array | ChunkedArray],
    dimension: int,
    *,
    gathers: bool = False,
) -> tuple[tuple[jax.Array, ...], Blocks]:
    """The sum over the weights' axis of ``xᵀ y`` for each y, scattered like the weights.

    Every term travels to its owner in the dtype of x and y. The owner adds all terms at once.

    Returns:
      The gradient of each shard; and all blocks of the weights, if `gathers`, or none.
    """
    sharding = weights.sharding
    scatter = Ring("scatter", "direct", sharding.axis_name, sharding.dimension, rows=1)
    gather = None
    if gathers:
        gather = WeightGather(weights, co_gathered=True)
        gather.held, x, ys = lax.optimization_barrier((gather.held, x, ys))

    def multiply(chunk: Chunk, operands: Any) -> tuple[jax.Array, ...]:
        return weight_gradients(weights, scatter.start(chunk), *operands, dimension=dimension)

    dws = walk_scatter(scatter, gather, multiply, (x, tuple(ys)), weights.gradient_dtype)
    return dws, [] if gather is None else gather.blocks()


def _product(
    x: jax.Array, sizes: dict[int, int], columns: int, weights: ShardedWeights
) -> jax.Array:
    """An uninitialized product of x, with other sizes of dimensions, and a weight."""
    return empty_like(x, sizes | {x.ndim - 1: columns}, *weights.shards)


def _all_rows(array: jax.Array, dimension: int) -> Rows:
    return Rows(array, 0, array.shape[dimension])
