"""Walks a gather whose chunks are worked on where they arrive, and whose results go home.

Shards travel as a schedule of use "gather" says. What a device makes of a shard goes straight back
to the shard's owner while the device works on the next one. The owner adds what it receives, in the
order of the devices as it counts them, in float32.

The last result has no other shard left to travel under. It is made in pieces, each of which travels
while the next is made; and work that nobody waits for follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from collective_matmul.operands.arithmetic import add
from collective_matmul.schedule.schedules import Chunk, Schedule
from collective_matmul.schedule.walk import Gather

#: Makes one piece of the result of a visit from the visit's state.
Piece = Callable[[Any], Any]


class Visit(NamedTuple):
    """Rows that a device works on: those of a chunk.

    Attributes:
      chunk: whose rows, and which part of them.
      start: the first row in the owner's shard.
      size: the number of rows.
      pieces: the number of pieces of its result.
    """

    chunk: Chunk
    start: int
    size: int
    pieces: int


def visits_of(schedule: Schedule, rows: int, last_pieces: int = 1) -> list[Visit]:
    """The visits of each device, in order.

    Args:
      schedule: a schedule of use "gather".
      rows: of a shard.
      last_pieces: pieces of the last result, if it goes to another device.
    """
    bounds = schedule.part_bounds(rows)
    order = [chunk for step in schedule.steps for chunk in step.multiply]
    visits = []
    for chunk in order:
        start, stop = bounds[chunk.part]
        last = chunk == order[-1] and chunk.offset
        visits.append(Visit(chunk, start, stop - start, last_pieces if last else 1))
    return visits


def bytes_returned(schedule: Schedule, result_bytes: int) -> int:
    """Bytes that each device sends home, for results of `result_bytes` for a whole shard."""
    return (schedule.devices - 1) * result_bytes


def walk_round_trip(
    gather: Gather,
    visits: Sequence[Visit],
    work: Callable[[int, Any, Any], tuple[Sequence[Piece], Any]],
    finish: Callable[[int, Any, Any, Any], Any],
    operands: Any,
    carry: Any,
) -> tuple[Any, Any]:
    """Works on all shards as they arrive, and sums the results of this device's own at home.

    Args:
      gather: the shards: pytrees of arrays [rows, ...].
      visits: the visits, by `visits_of`.
      work: ``work(number of the visit, its rows, operands)`` returns functions of a state, which
        make the pieces of the result, pytrees of arrays [rows, ...]; and that state, a pytree.
        Pieces are parts of the last dimension.
      finish: ``finish(number, state, operands, carry)`` returns the next `carry`.
      operands: arrays that are used, not before their step.
      carry: the initial carry.

    Returns:
      The sum of the results of all devices, for this device's rows; and the last carry.
    """
    remaining = dict(enumerate(visits))
    made: dict[tuple[int, int], Any] = {}
    home: dict[tuple[int, int], Any] = {}
    for i, step in enumerate(gather.steps):
        arriving = gather.send(step)
        home |= _returned(gather, visits, made)
        made = {}
        chunks = dict.fromkeys(step.multiply)
        numbers = [number for number, visit in remaining.items() if visit.chunk in chunks]
        is_last = i + 1 == len(gather.steps)
        for number in numbers:
            visit = remaining.pop(number)
            pieces, state = work(number, gather.held[visit.chunk], operands)
            for p, piece in enumerate(pieces):
                made[number, p] = piece(state)
                if is_last and visit.chunk.offset:
                    # This piece leaves before the next is made, and before what follows; and after
                    # the piece before it has arrived, so that this one is made meanwhile.
                    tied = made, state, operands, home
                    made, state, operands, home = lax.optimization_barrier(tied)
                    home |= _returned(gather, visits, made)
                    made = {}
            carry = finish(number, state, operands, carry)
        gather.receive(i, arriving)
        if not is_last:
            tied = gather.used_by(i + 1), operands, made, carry, home
            used, operands, made, carry, home = lax.optimization_barrier(tied)
            gather.hold(used)
    home |= _returned(gather, visits, made)
    return _summed(gather, visits, home), carry


def _returned(
    gather: Gather, visits: Sequence[Visit], made: dict[tuple[int, int], Any]
) -> dict[tuple[int, int], Any]:
    """The results that arrive at home when all devices send these to their owners.

    All results of a visit are named by its number: another device made them, on the same visit.
    """
    devices, arrived = gather.devices, {}
    for (number, piece), result in made.items():
        hop = visits[number].chunk.offset
        pairs = [(d, (d + hop) % devices) for d in range(devices)]
        send = lambda x, pairs=pairs: lax.ppermute(x, gather.axis_name, pairs)  # noqa: E731
        arrived[number, piece] = jax.tree.map(send, result) if hop else result
    return arrived


def _summed(gather: Gather, visits: Sequence[Visit], home: dict[tuple[int, int], Any]) -> Any:
    """The sum over devices, of all parts and pieces."""
    terms: dict[int, dict[int, list[Any]]] = {}
    for (number, _), value in sorted(home.items()):
        visit = visits[number]
        terms.setdefault(visit.chunk.offset, {}).setdefault(visit.start, []).append(value)

    def joined(parts: dict[int, list[Any]]) -> Any:
        rows = [_concatenated(pieces, -1) for _, pieces in sorted(parts.items())]
        return _concatenated(rows, 0)

    of_devices = [joined(parts) for _, parts in sorted(terms.items())]
    return jax.tree.map(add, *of_devices)


def _concatenated(values: Sequence[Any], dimension: int) -> Any:
    if len(values) == 1:
        return values[0]

    def joined(*arrays: jax.Array) -> jax.Array:
        return lax.concatenate(arrays, dimension % arrays[0].ndim)

    return jax.tree.map(joined, *values)


def owner_of(gather: Gather, visit: Visit) -> jax.Array:
    """The device whose rows these are."""
    return lax.rem(gather.device + visit.chunk.offset, np.int32(gather.devices))
