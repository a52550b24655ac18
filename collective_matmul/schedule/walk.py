"""Walks a schedule with `ppermute`, in lockstep.

The loop is unrolled. Step i issues the permutes that the schedule gives it and multiplies the
chunks that have arrived. An `optimization_barrier` then ties together what step i + 1 uses and what
was computed. The permutes of step i + 1 can therefore start only when matmul i + 1 can, so a
compiler that knows neither's cost still runs them side by side. Only the chunks in use are alive:
the one being multiplied and the one arriving, or one more in the direct pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Sharing
from collective_matmul.operands.arithmetic import add
from collective_matmul.operands.chunked import Chunked
from collective_matmul.schedule.schedules import Chunk, Pattern, Step, Use, make_schedule
from collective_matmul.transport import TRANSPORTS, Transport, transport_over

#: Arrays, or pytrees of arrays, by chunk.
Chunks = dict[Chunk, Any]

_BESIDE_NCCL = Sharing(left=16, by_xla=True)

#: How the products of a loop share the GPU with its transfers. Copy engines need nothing of it.
SHARING: dict[Transport, Sharing] = dict.fromkeys(TRANSPORTS, _BESIDE_NCCL)
SHARING["peer_copies"] = Sharing()


class Ring:
    """A schedule on a mesh axis, and the place of its chunks in arrays along one dimension.

    Several mesh axes are one, in the order of their names. `rows` is the size of one shard along
    `dimension`; whole arrays have D times that.
    """

    def __init__(
        self,
        use: Use,
        pattern: Pattern,
        axis_name: str | tuple[str, ...],
        dimension: int,
        rows: int,
    ):
        self.axis_name = axis_name
        self.devices = lax.axis_size(axis_name)
        self.device = axis_index(axis_name)
        # One row has no halves to send both ways.
        self.schedule = make_schedule(use, pattern if rows > 1 else "one_way", self.devices)
        self.steps = self.schedule.steps
        self.dimension = dimension
        self.rows = rows
        self.bounds = self.schedule.part_bounds(rows)
        self._sharing = SHARING[transport_over(axis_name)]

    def beside(self, multiply: Callable[..., Any]) -> Callable[..., Any]:
        """A product beside which the ring communicates."""

        @functools.wraps(multiply)
        def sharing(*args: Any) -> Any:
            with device.sharing(self._sharing):
                return multiply(*args)

        return sharing

    def permute(self, chunks: Chunks, step: Step) -> Chunks:
        """Executes the sends of a step; returns what arrives."""
        return {
            send.arrival: lax.ppermute(
                chunks[send.chunk], self.axis_name, send.permutation(self.devices)
            )
            for send in step.sends
        }

    def chunks_sent_by(self, i: int) -> set[Chunk]:
        """The chunks that step i sends; none after the last step."""
        return {send.chunk for step in self.steps[i : i + 1] for send in step.sends}

    def chunks_used_by(self, i: int) -> set[Chunk]:
        """The chunks that step i sends or multiplies."""
        return self.chunks_sent_by(i) | {c for step in self.steps[i : i + 1] for c in step.multiply}

    def size(self, chunk: Chunk) -> int:
        """Number of rows of a chunk."""
        start, stop = self.bounds[chunk.part]
        return stop - start

    def start(self, chunk: Chunk) -> jax.Array:
        """The first row of a chunk in a whole array."""
        # The `%` of arrays computes with constants alone, which a loop would compute first.
        owner = lax.rem(self.device + chunk.offset, np.int32(self.devices))
        return owner * self.rows + self.bounds[chunk.part][0]

    def join(self, chunks: Chunks) -> Any:
        """This device's own shard from its parts."""
        first, *others = (chunks[Chunk(0, part)] for part in range(len(self.bounds)))
        if not others:
            return first
        concatenate = lambda *parts: lax.concatenate(parts, self.dimension)  # noqa: E731
        return jax.tree.map(concatenate, first, *others)


class Gather(Ring):
    """The chunks of a running gather. It holds those that a later step needs.

    With `co_gathered`, they travel with a scatter: they are not multiplied, only kept. A shard is
    an array, or a pytree of arrays that are all cut along the dimension.
    """

    def __init__(
        self,
        shard: Any,
        pattern: Pattern,
        axis_name: str | tuple[str, ...],
        dimension: int,
        *,
        co_gathered: bool = False,
    ):
        rows = jax.tree.leaves(shard)[0].shape[dimension]
        super().__init__("gather", pattern, axis_name, dimension, rows)
        self.co_gathered = co_gathered
        self.held: Chunks = {
            Chunk(0, part): jax.tree.map(
                functools.partial(
                    lax.slice_in_dim, start_index=start, limit_index=stop, axis=dimension
                ),
                shard,
            )
            for part, (start, stop) in enumerate(self.bounds)
        }
        self._arrived = dict(self.held)

    def send(self, step: Step) -> Chunks:
        """Executes the sends of a step; returns what arrives."""
        return self.permute(self.held, step)

    def receive(self, i: int, arriving: Chunks) -> None:
        """Holds what arrived in step i, and releases what no later step needs."""
        self._arrived |= arriving
        needed = self.schedule.chunks_used_after(i)
        held = self.held | arriving
        self.held = {chunk: value for chunk, value in held.items() if chunk in needed}

    def used_by(self, i: int) -> Chunks:
        """The held chunks that step i sends or, unless they are co-gathered, multiplies."""
        used = self.chunks_sent_by(i) if self.co_gathered else self.chunks_used_by(i)
        return {chunk: self.held[chunk] for chunk in sorted(used)}

    def hold(self, used: Chunks) -> None:
        """Replaces chunks by those that a barrier returned."""
        self.held |= used

    def gathered(self) -> Chunked:
        """All chunks, once the last has arrived."""
        chunks = sorted(self._arrived)
        return Chunked([self._arrived[c] for c in chunks], [self.start(c) for c in chunks])


def walk_exchange(blocks: Sequence[Any], axis_name: str | tuple[str, ...]) -> list[Any]:
    """An all-to-all: sends a block straight to each device of an axis.

    Nothing is computed between its sends. To return blocks, reverse all but the first.

    Args:
      blocks: D arrays, or pytrees of arrays. Block i is for the device that is i places after this
        one. All but the first, which stays, have equal shapes.
      axis_name: the mesh axis, or several.

    Returns:
      The blocks that arrive. Block i is from the device that is i places before this one.
    """
    devices = len(blocks)
    arrived = {Chunk(0, 0): blocks[0]}
    for step in make_schedule("exchange", "direct", devices).steps:
        for send in step.sends:
            pairs = send.permutation(devices)
            move = functools.partial(lax.ppermute, axis_name=axis_name, perm=pairs)
            arrived[send.arrival] = jax.tree.map(move, blocks[send.chunk.part])
    return [arrived[Chunk(-i % devices, i)] for i in range(devices)]


def walk_gather(
    gather: Gather,
    multiply: Callable[..., Any],
    operands: Any,
    result: Any,
) -> Any:
    """Multiplies the shards as they arrive.

    Args:
      gather: the shards.
      multiply: ``multiply(chunk, its array, operands, result)`` returns the next result.
      operands: arrays that are sliced, each slice not before its step.
      result: the initial result.

    Returns:
      The result of all chunks.
    """
    multiply = gather.beside(multiply)
    for i, step in enumerate(gather.steps):
        arriving = gather.send(step)
        for chunk in step.multiply:
            result = multiply(chunk, gather.held[chunk], operands, result)
        gather.receive(i, arriving)
        if i + 1 < len(gather.steps):
            tied = gather.used_by(i + 1), operands, result
            used, operands, result = lax.optimization_barrier(tied)
            gather.hold(used)
    return result


def walk_scatter(
    scatter: Ring,
    gather: Gather | None,
    multiply: Callable[..., Any],
    operands: Any,
    dtype: Any = None,
) -> Any:
    """Sums the chunks while their accumulators travel.

    Args:
      scatter: the place of the chunks.
      gather: shards to gather in the same loop, if any.
      multiply: ``multiply(chunk, operands)`` is this device's term of the chunk's sum: an array, or
        a pytree of arrays.
      operands: arrays that are sliced.
      dtype: of the result; by default that of the terms.

    Returns:
      The sum of this device's own chunk.
    """
    # The terms of each chunk's sum so far. They are added in one pass when the sum leaves.
    terms: dict[Chunk, list[Any]] = {}
    multiply = scatter.beside(multiply)
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
            terms[chunk] = [jax.tree.map(add, *terms[chunk])]
        if i + 1 < len(scatter.steps):
            # The operands are tied too, so that the next matmul starts after this step. Arrived
            # chunks are tied too: an array that is being sent stays in memory until it has arrived.
            co_gathered = {} if gather is None else gather.used_by(i + 1)
            tied = operands, terms, co_gathered
            operands, terms, co_gathered = lax.optimization_barrier(tied)
            if gather is not None:
                gather.hold(co_gathered)
    total = functools.partial(add, dtype=dtype)
    return scatter.join({chunk: jax.tree.map(total, *each) for chunk, each in terms.items()})
