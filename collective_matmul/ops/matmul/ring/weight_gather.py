"""Rings whose weights are sharded over a second mesh axis.

T devices are on the axis of the ring, F on that of the weights. A weight's shards come straight
from their owners, while the first chunk of the ring is multiplied by those that are there already;
the other chunks find them all. With T = 1, as in fully sharded data parallelism without tensor
parallelism, that first chunk is all there is.

XLA executes two permutes at one time, and no product hides a third. So what travels on the axis of
the ring waits for all weights: it is sent beside the last product of the first chunk.

In a backward pass with T = 1 the weight gradient comes first. Under its products travel the shards,
which the gradient of x needs, and the finished terms of the weight gradient, each to its owner.

Barriers keep weight gradients in their place. Nothing else waits for them, so XLA would postpone
them, and then nothing hides what travels under them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.arithmetic import add
from collective_matmul.operands.chunked import Chunked, empty_like, write
from collective_matmul.operands.sharded import Sharded
from collective_matmul.operands.weight_blocks import Blocks, contract_block, multiply_blocks
from collective_matmul.ops.matmul.ring.matmul_walk import Places, Weights, WholeWeights
from collective_matmul.schedule.schedules import Chunk, Pattern
from collective_matmul.schedule.walk import Gather, Ring, walk_gather, walk_scatter


def weights_of_walk(ws: Sequence[Any], *, transpose_w: bool) -> Weights:
    """The weights of a walk: whole, arriving in its first product, or arrived before."""
    if isinstance(ws[0], Arrived):
        return ArrivedWeights(ws, transpose_w=transpose_w)
    if isinstance(ws[0], Sharded):
        return ArrivingWeights(ws, transpose_w=transpose_w)
    return WholeWeights(ws, transpose_w=transpose_w)


class WeightGather(Gather):
    """A running gather of weights. Its chunks are the shards of all weights of one device."""

    def __init__(
        self, weights: Sequence[Sharded], pattern: Pattern = "direct", *, co_gathered: bool = False
    ):
        sharding = weights[0].sharding
        Ring.__init__(self, "gather", pattern, sharding.axis_name, sharding.dimension, rows=1)
        self.co_gathered = co_gathered
        self.held = {Chunk(0, 0): tuple(w.value for w in weights)}
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
    """Weights that arrive while the first chunk is multiplied, in several products.

    Attributes:
      arrays: this device's shards.
      columns: N of each weight.
    """

    def __init__(self, weights: Sequence[Sharded], *, transpose_w: bool = False):
        self.arrays = [w.value for w in weights]
        self.columns = [w.shape[0 if transpose_w else 1] for w in weights]
        self._weights = weights
        self._transpose_w = transpose_w
        self._blocks: Blocks = []
        self._finish_first: Callable[..., tuple[jax.Array, ...]] | None = None

    def begin(
        self, xs: Sequence[Rows], outs: Places, dimension: int, waiting: Any
    ) -> tuple[Sequence[Rows], Any]:
        """Multiplies the first chunk by the weights that arrive, until all are here.

        See `Weights`. One product of that chunk is left, beside which `waiting` can be sent.
        """
        columns = self._weights[0].divides_columns(self._transpose_w)
        # The direct pattern is one chunk further ahead: two permutes at one time, of one weight.
        one_way = columns and len(self.arrays) > 1
        gather = WeightGather(self._weights, "one_way" if one_way else "direct")
        # Shards wait for x. Else all weights of a program could be gathered at its start.
        tied = gather.held, [x.array for x in xs]
        gather.held, arrays = lax.optimization_barrier(tied)
        begin = self._columns_as_they_arrive if columns else self._sum_in_two_parts
        arrays, waiting = begin(gather, _replaced(xs, arrays), outs(), dimension, waiting)
        self._blocks = gather.blocks()
        return _replaced(xs, arrays), waiting

    def multiply(
        self, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        """See `Weights`."""
        finish, self._finish_first = self._finish_first, None
        if finish is not None:
            return finish(xs)
        return self._multiply(self._blocks, xs, outs, dimension)

    def _columns_as_they_arrive(
        self,
        gather: WeightGather,
        xs: Sequence[Rows],
        outs: Sequence[Rows],
        dimension: int,
        waiting: Any,
    ) -> tuple[Any, Any]:
        """Each block of columns is a product of its own."""
        last = gather.steps[-1].multiply

        def multiply(chunk: Chunk, shards: Any, _: Any, state: Any) -> Any:
            written, arrays, waiting = state
            if chunk in last:
                return state
            block, places = (gather.number(chunk), shards), _replaced(outs, written)
            written = self._multiply([block], _replaced(xs, arrays), places, dimension)
            return written, arrays, waiting

        state = tuple(out.array for out in outs), [x.array for x in xs], waiting
        written, arrays, waiting = walk_gather(gather, multiply, (), state)
        *_, block = gather.blocks()
        places = _replaced(outs, written)
        self._finish_first = lambda xs: self._multiply([block], xs, places, dimension)
        return arrays, waiting

    def _sum_in_two_parts(
        self,
        gather: WeightGather,
        xs: Sequence[Rows],
        outs: Sequence[Rows],
        dimension: int,
        waiting: Any,
    ) -> tuple[Any, Any]:
        """The term of the own shard, while all others arrive; then their sum, in one product."""
        for i, step in enumerate(gather.steps):
            gather.receive(i, gather.send(step))
        arrays = [x.array for x in xs]
        own, *others = gather.blocks()
        if not others:
            self._finish_first = lambda xs: self._multiply([own], xs, outs, dimension)
            return arrays, waiting
        parts = [Rows(empty_like(o.array, {dimension: o.size}), 0, o.size) for o in outs]
        first = self._multiply([own], xs, parts, dimension)
        tied = others, first, arrays, waiting
        others, first, arrays, waiting = lax.optimization_barrier(tied)

        def finish(xs: Sequence[Rows]) -> tuple[jax.Array, ...]:
            rest = self._multiply(others, xs, parts, dimension)
            totals = zip(outs, map(add, first, rest), strict=True)
            return tuple(write(out, total, dimension) for out, total in totals)

        self._finish_first = finish
        return arrays, waiting

    def _multiply(
        self, blocks: Blocks, xs: Sequence[Rows], outs: Sequence[Rows], dimension: int
    ) -> tuple[jax.Array, ...]:
        return multiply_blocks(
            self._weights, blocks, xs, outs, dimension=dimension, transpose_w=self._transpose_w
        )


class Arrived(NamedTuple):
    """A sharded weight after its gather: all blocks of all weights of the op are here."""

    weight: Sharded
    blocks: Blocks


class ArrivedWeights(ArrivingWeights):
    """Weights whose blocks are all here before the walk begins."""

    def __init__(self, weights: Sequence[Arrived], *, transpose_w: bool = False):
        super().__init__([w.weight for w in weights], transpose_w=transpose_w)
        self._blocks = weights[0].blocks

    def begin(
        self, xs: Sequence[Rows], outs: Places, dimension: int, waiting: Any
    ) -> tuple[Sequence[Rows], Any]:
        """Nothing: all blocks are here."""
        del outs, dimension
        return xs, waiting


def _replaced(chunks: Sequence[Rows], arrays: Sequence[jax.Array]) -> list[Rows]:
    """The chunks with other arrays."""
    return [chunk._replace(array=array) for chunk, array in zip(chunks, arrays, strict=True)]


def scatter_weight_gradients(
    weights: Sequence[Sharded],
    x: jax.Array | Chunked,
    ys: Sequence[jax.Array | Chunked],
    dimension: int,
    *,
    gathers_as: Any = None,
) -> tuple[tuple[jax.Array, ...], Sequence[Arrived]]:
    """The sum over the weights' axis of ``xᵀ y`` for each y, scattered like the weights.

    Every term travels to its owner in the dtype of x and y. The owner adds all terms at once, in
    the dtype of the shards.

    Args:
      weights: the weights as the user stores them.
      x: rows [..., K].
      ys: rows [..., N].
      dimension: the dimension that chunks divide.
      gathers_as: the dtype in which the shards of the weights travel beside the terms, or None.

    Returns:
      The gradient of each shard; and the weights, if they were gathered, or none.
    """
    sharding, dtype = weights[0].sharding, weights[0].dtype
    scatter = Ring("scatter", "direct", sharding.axis_name, sharding.dimension, rows=1)
    gather = None
    if gathers_as is not None:
        weights = [w.with_value(w.value.astype(gathers_as)) for w in weights]
        gather = WeightGather(weights, "one_way", co_gathered=True)
        gather.held, x, ys = lax.optimization_barrier((gather.held, x, ys))

    def multiply(chunk: Chunk, operands: Any) -> tuple[jax.Array, ...]:
        return contract_block(sharding, scatter.start(chunk), *operands, dimension=dimension)

    dws = walk_scatter(scatter, gather, multiply, (x, tuple(ys)), dtype)
    return dws, [] if gather is None else [Arrived(w, gather.blocks()) for w in weights]
