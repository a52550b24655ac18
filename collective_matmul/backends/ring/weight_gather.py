"""Rings whose weights are sharded over a second mesh axis.

T devices are on the axis of the ring, F on that of the weights. A weight's shards come straight
from their owners, while the first chunk of the ring is multiplied by those that are there already;
the other chunks find them all. With T = 1, as in fully sharded data parallelism without tensor
parallelism, that first chunk is all there is.

In a backward pass with T = 1 the weight gradient comes first. Under its products travel the shards,
which the gradient of x needs, and the finished terms of the weight gradient, each to its owner.

Barriers keep weight gradients in their place. Nothing else waits for them, so XLA would postpone
them, and then nothing hides what travels under them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import lax

from collective_matmul.backends.arithmetic import add
from collective_matmul.backends.base import ShardedWeightBackend
from collective_matmul.backends.chunked_array import ChunkedArray, empty_like, write
from collective_matmul.backends.ring.matmul_walk import Weights, gather_matmul, matmul_scatter
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

    def used_by(self, i: int) -> dict[Chunk, Any]:
        """Beside a scatter, all that has arrived.

        The product that follows needs it, and XLA would send it shortly before.
        """
        return super().used_by(i) | (self._arrived if self.co_gathered else {})

    def hold(self, used: dict[Chunk, Any]) -> None:
        """Replaces chunks by those that a barrier returned."""
        super().hold(used)
        self._arrived |= used

    def number(self, chunk: Chunk) -> Any:
        """The number of a chunk's block, which is that of its owner."""
        return self.start(chunk)

    def blocks(self) -> Blocks:
        """All blocks that have arrived, this device's own first."""
        return [(self.number(chunk), self._arrived[chunk]) for chunk in sorted(self._arrived)]


class ArrivingWeights(Weights):
    """Weights that arrive while the first product with them is computed."""

    def __init__(self, weights: ShardedWeights, *, transpose_w: bool = False):
        self.arrays = weights.shards
        self.columns = [w.shape[0 if transpose_w else 1] for w in weights.whole]
        self._weights = weights
        self._transpose_w = transpose_w
        self._blocks: Blocks | None = None

    def multiply(
        self, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """See `Weights`. Call it first with what is there first."""
        if self._blocks is not None:
            return self._multiply(self._blocks, xs, outs, dimension)
        gather = WeightGather(self._weights)
        # Shards wait for x. Else all weights of a program could be gathered at its start.
        tied = gather.held, [x.array for x in xs]
        gather.held, arrays = lax.optimization_barrier(tied)
        xs = [x._replace(array=array) for x, array in zip(xs, arrays, strict=True)]
        if self._weights.divides_columns(self._transpose_w):
            results = self._columns_as_they_arrive(gather, xs, outs, dimension)
        else:
            results = self._sum_in_two_parts(gather, xs, outs, dimension)
        self._blocks = gather.blocks()
        return results

    def _columns_as_they_arrive(
        self, gather: WeightGather, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """Each block of columns is a product of its own."""

        def multiply(chunk: Chunk, shards: Any, _: Any, arrays: Any) -> tuple[jax.Array, ...]:
            places = [out._replace(array=a) for out, a in zip(outs, arrays, strict=True)]
            return self._multiply([(gather.number(chunk), shards)], xs, places, dimension)

        return walk_gather(gather, multiply, (), tuple(out.array for out in outs))

    def _sum_in_two_parts(
        self, gather: WeightGather, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """The term of the own shard, while all others arrive; then their sum, in one product."""
        for i, step in enumerate(gather.steps):
            gather.receive(i, gather.send(step))
        own, *others = gather.blocks()
        if not others:
            return self._multiply([own], xs, outs, dimension)
        parts = [Rows(empty_like(o.array, {dimension: o.size}), 0, o.size) for o in outs]
        first = self._multiply([own], xs, parts, dimension)
        others, first = lax.optimization_barrier((others, first))
        rest = self._multiply(others, xs, parts, dimension)
        sums = map(add, first, rest)
        return tuple(write(out, total, dimension) for out, total in zip(outs, sums, strict=True))

    def _multiply(
        self, blocks: Blocks, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        return multiply_blocks(
            self._weights, blocks, xs, outs, dimension=dimension, transpose_w=self._transpose_w
        )


class ShardedWeightRing(ShardedWeightBackend, Protocol):
    """A ring that also gathers sharded weights.

    Attributes:
      pattern: the pattern of the ring. Weights always come straight from their owners.
    """

    pattern: Pattern

    def gather_with_shards(
        self, x: jax.Array, weights: ShardedWeights, axis_name: str, *, dimension: int
    ) -> tuple[jax.Array, ...]:
        """Multiplies the first shard of x by the weights as they arrive, the others by all."""
        gather = Gather(x, self.pattern, axis_name, dimension)
        return gather_matmul(gather, x, ArrivingWeights(weights))

    def gather_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dys: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
    ) -> Gradients:
        """Sums dx while its accumulators travel, and x beside them; then the weight gradients."""
        if lax.axis_size(axis_name) == 1:
            return _gradients_without_ring(x, weights, dys, dimension)
        scatter = Ring("scatter", self.pattern, axis_name, dimension, x.shape[dimension])
        gather = Gather(x, self.pattern, axis_name, dimension, co_gathered=True)
        dx = matmul_scatter(scatter, gather, dys, ArrivingWeights(weights, transpose_w=True))
        dws, _ = scatter_weight_gradients(weights, gather.gathered(), dys, dimension)
        return lax.optimization_barrier((dx, dws))

    def scatter_with_shards(
        self, x: jax.Array, weights: ShardedWeights, axis_name: str, *, dimension: int
    ) -> jax.Array:
        """Multiplies the first chunk of x by the weights as they arrive, the others by all."""
        rows = x.shape[dimension] // lax.axis_size(axis_name)
        scatter = Ring("scatter", self.pattern, axis_name, dimension, rows)
        return matmul_scatter(scatter, None, [x], ArrivingWeights(weights))

    def scatter_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dy: jax.Array,
        axis_name: str,
        *,
        dimension: int,
    ) -> Gradients:
        """Multiplies the shards of dy as they arrive; then the weight gradient."""
        if lax.axis_size(axis_name) == 1:
            return _gradients_without_ring(x, weights, [dy], dimension)
        gather = Gather(dy, self.pattern, axis_name, dimension)
        (dx,) = gather_matmul(gather, dy, ArrivingWeights(weights, transpose_w=True))
        dws, _ = scatter_weight_gradients(weights, x, [gather.gathered()], dimension)
        return lax.optimization_barrier((dx, dws))


def _gradients_without_ring(
    x: jax.Array, weights: ShardedWeights, dys: Sequence[jax.Array], dimension: int
) -> Gradients:
    """The weight gradients, while the weights arrive; then dx, in one product."""
    dws, blocks = scatter_weight_gradients(weights, x, dys, dimension, gathers=True)
    dws, dys = lax.optimization_barrier((dws, tuple(dys)))
    rows = x.shape[dimension]
    places = [Rows(dy, 0, rows) for dy in dys]
    out = Rows(empty_like(x, {}, *dys, *weights.shards), 0, rows)
    (dx,) = multiply_blocks(weights, blocks, places, [out], dimension=dimension, transpose_w=True)
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
