"""Walks a schedule with `ppermute`, in lockstep.

The loop is unrolled: step i issues the permutes that the schedule gives it, multiplies the chunks
that are here, and then ties what step i + 1 uses and what was computed together with an
`optimization_barrier`. The permutes of step i + 1 can therefore start only when matmul i + 1 can,
so a compiler that knows nothing of either's cost still runs them side by side, and no more chunks
are alive than the schedule has under way: the one being multiplied and the one arriving, or one
more in the direct pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.backends.arithmetic import add
from collective_matmul.backends.chunked_array import (
    ChunkedArray,
    empty_like,
    multiply_chunks,
    weight_gradients,
)
from collective_matmul.backends.ring.schedule import Chunk, Pattern, Step, Use, make_schedule
from collective_matmul.mosaic_gpu.chunk_matmul import Rows

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "weight_gradients"]

Chunks = dict[Chunk, jax.Array]


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    keep_gathered: bool = False,
    pattern: Pattern = "one_way",
) -> tuple[tuple[jax.Array, ...], ChunkedArray | None]:
    """Multiplies the shards of x as they arrive. Shapes: see the package's docstring."""
    gather = Gather(x, pattern, axis_name, dimension)
    whole = {dimension: x.shape[dimension] * gather.devices}
    columns = [w.shape[0 if transpose_w else 1] for w in ws]
    outs = tuple(
        empty_like(x, whole | {x.ndim - 1: n}, w) for n, w in zip(columns, ws, strict=True)
    )

    def multiply(chunk: Chunk, shard: jax.Array, _, outs):
        here = Rows(shard, 0, gather.size(chunk))
        places = [Rows(out, gather.start(chunk), here.size) for out in outs]
        return multiply_chunks([here], [ws], places, dimension=dimension, transpose_w=transpose_w)

    outs = walk_gather(gather, multiply, (), outs)
    return outs, gather.gathered() if keep_gathered else None


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    co_gathered: jax.Array | None = None,
    pattern: Pattern = "one_way",
) -> tuple[jax.Array, ChunkedArray | None]:
    """Sums the chunks while their accumulators travel. Shapes: see the package's docstring."""
    rows = xs[0].shape[dimension] // lax.axis_size(axis_name)
    scatter = Ring("scatter", pattern, axis_name, dimension, rows)
    gather = (
        None
        if co_gathered is None
        else Gather(co_gathered, pattern, axis_name, dimension, rides=True)
    )
    columns = ws[0].shape[0 if transpose_w else 1]

    def multiply(chunk: Chunk, xs: Sequence[jax.Array]) -> jax.Array:
        places = [Rows(x, scatter.start(chunk), scatter.size(chunk)) for x in xs]
        like = {dimension: places[0].size, xs[0].ndim - 1: columns}
        out = Rows(empty_like(xs[0], like, *xs[1:], *ws), 0, places[0].size)
        (product,) = multiply_chunks(
            places, [[w] for w in ws], [out], dimension=dimension, transpose_w=transpose_w
        )
        return product

    y = walk_scatter(scatter, gather, multiply, xs)
    return y, None if gather is None else gather.gathered()


def matmul_all_reduce(
    x: jax.Array, w: jax.Array, axis_name: str, *, pattern: Pattern = "one_way"
) -> jax.Array:
    """Reduce-scatters the rows in a ring, then gathers them with one collective.

    The gather has no matmul left to hide under. Shapes: see the package's docstring. The product
    of the leading dimensions must be a multiple of D.
    """
    if pattern == "direct":
        # Its sums are made at the end, of D - 1 chunks that bulk, which sums in place, never holds.
        pattern = "one_way"
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y, _ = matmul_reduce_scatter([rows], [w], axis_name, dimension=0, pattern=pattern)
    y = lax.all_gather(y, axis_name, axis=0, tiled=True, to="invarying")
    return y.reshape(*x.shape[:-1], w.shape[1])


class Ring:
    """A schedule on a mesh axis, and where its chunks lie in arrays along one dimension.

    `rows` is the size of one shard along `dimension`; whole arrays have D times that.
    """

    def __init__(self, use: Use, pattern: Pattern, axis_name: str, dimension: int, rows: int):
        self.axis_name = axis_name
        self.devices = lax.axis_size(axis_name)
        self.device = axis_index(axis_name)
        # One row has no halves to send both ways.
        self.schedule = make_schedule(use, pattern if rows > 1 else "one_way", self.devices)
        self.steps = self.schedule.steps
        self.dimension = dimension
        self.rows = rows
        self.bounds = self.schedule.part_bounds(rows)

    def permute(self, chunks: Chunks, step: Step) -> Chunks:
        """Carries out the sends of a step; returns what arrives."""
        return {
            send.arrival: lax.ppermute(
                chunks[send.chunk], self.axis_name, send.permutation(self.devices)
            )
            for send in step.sends
        }

    def chunks_sent_by(self, i: int) -> set[Chunk]:
        """What step i sends; nothing after the last step."""
        return {send.chunk for step in self.steps[i : i + 1] for send in step.sends}

    def chunks_used_by(self, i: int) -> set[Chunk]:
        """What step i sends or multiplies."""
        return self.chunks_sent_by(i) | {c for step in self.steps[i : i + 1] for c in step.multiply}

    def size(self, chunk: Chunk) -> int:
        """Rows of a chunk."""
        start, stop = self.bounds[chunk.part]
        return stop - start

    def start(self, chunk: Chunk) -> jax.Array:
        """Where a chunk begins in a whole array."""
        owner = (self.device + chunk.offset) % self.devices
        return owner * self.rows + self.bounds[chunk.part][0]

    def join(self, chunks: Chunks) -> jax.Array:
        """This device's own shard from its parts."""
        parts = [chunks[Chunk(0, part)] for part in range(len(self.bounds))]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, self.dimension)


class Gather(Ring):
    """The chunks of a gather under way: held are those that a later step needs.

    Chunks that ride beside a scatter are not multiplied, only kept.
    """

    def __init__(
        self,
        shard: jax.Array,
        pattern: Pattern,
        axis_name: str,
        dimension: int,
        *,
        rides: bool = False,
    ):
        super().__init__("gather", pattern, axis_name, dimension, shard.shape[dimension])
        self.rides = rides
        self.held: Chunks = {
            Chunk(0, part): lax.slice_in_dim(shard, start, stop, axis=dimension)
            for part, (start, stop) in enumerate(self.bounds)
        }
        self._arrived = dict(self.held)

    def send(self, step: Step) -> Chunks:
        """Carries out the sends of a step; returns what arrives."""
        return self.permute(self.held, step)

    def receive(self, i: int, arriving: Chunks) -> None:
        """Holds what arrived in step i, and lets go of what no later step needs."""
        self._arrived |= arriving
        needed = self.schedule.chunks_used_after(i)
        held = self.held | arriving
        self.held = {chunk: value for chunk, value in held.items() if chunk in needed}

    def used_by(self, i: int) -> Chunks:
        """Of the chunks held, those that step i sends or, unless they only ride, multiplies."""
        used = self.chunks_sent_by(i) if self.rides else self.chunks_used_by(i)
        return {chunk: self.held[chunk] for chunk in sorted(used)}

    def gathered(self) -> ChunkedArray:
        """All chunks, once the last has arrived."""
        chunks = sorted(self._arrived)
        return ChunkedArray([self._arrived[c] for c in chunks], [self.start(c) for c in chunks])


def walk_gather(gather: Gather, multiply: Callable[..., Any], operands: Any, result: Any) -> Any:
    """Multiplies the shards as they arrive.

    Args:
      gather: the shards.
      multiply: ``multiply(chunk, its array, operands, result) -> result``, with the chunk's part.
      operands: arrays that slices are cut from: they must not be cut before their step.
      result: at first.

    Returns:
      The result with all chunks' parts.
    """
    for i, step in enumerate(gather.steps):
        arriving = gather.send(step)
        for chunk in step.multiply:
            result = multiply(chunk, gather.held[chunk], operands, result)
        gather.receive(i, arriving)
        if i + 1 < len(gather.steps):
            tied = gather.used_by(i + 1), operands, result
            used, operands, result = lax.optimization_barrier(tied)
            gather.held |= used
    return result


def walk_scatter(
    scatter: Ring, gather: Gather | None, multiply: Callable[..., jax.Array], operands: Any
) -> jax.Array:
    """Sums the chunks while their accumulators travel.

    Args:
      scatter: where the chunks lie.
      gather: shards that ride beside the accumulators, if any.
      multiply: ``multiply(chunk, operands)`` is this device's term of the chunk's sum.
      operands: arrays that slices are cut from.

    Returns:
      The sum of this device's own chunk.
    """
    # What a chunk's sum is made of so far: added up only when the sum leaves, in one pass.
    terms: dict[Chunk, list[jax.Array]] = {}
    for i, step in enumerate(scatter.steps):
        leaving = {send.chunk: terms.pop(send.chunk)[0] for send in step.sends}
        arriving = scatter.permute(leaving, step)
        if gather is not None:
            gather.receive(i, gather.send(gather.steps[i]))
        for chunk in step.multiply:
            terms.setdefault(chunk, []).append(multiply(chunk, operands))
        for chunk, value in arriving.items():
            terms.setdefault(chunk, []).append(value)
        for chunk in scatter.chunks_sent_by(i + 1):
            terms[chunk] = [add(*terms[chunk])]
        if i + 1 < len(scatter.steps):
            # The operands too: the next matmul must not start before this step has ended. All that
            # arrived too: an array that is being sent stays in memory until it has arrived.
            riding = {} if gather is None else gather.used_by(i + 1)
            operands, terms, riding = lax.optimization_barrier((operands, terms, riding))
            if gather is not None:
                gather.held |= riding
    return scatter.join({chunk: add(*values) for chunk, values in terms.items()})
