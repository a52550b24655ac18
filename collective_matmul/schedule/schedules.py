"""Schedules: the chunk that each device sends, receives and multiplies at each step, without JAX.

Every device runs the same program, so a schedule speaks relative to the device `d` that reads it.
A chunk is named by `offset`, its owner being device ``(d + offset) % D``, and by `part`, which of
the equal pieces of that owner's shard it is. A send goes from every `d` to ``(d + hop) % D`` at
once. Seen from the device that receives it, the chunk's offset has shrunk by `hop`.

Three uses share these names:

* **gather**: shards travel. At step i a device multiplies chunks that have arrived, while the sends
  of step i bring those of later steps.
* **scatter**: accumulators travel. At step i a device multiplies its own rows of a chunk, while the
  sends of step i carry what was finished by step i - 1; what arrives is added to it afterwards.
  At the end each device holds the sum of its own chunk, offset 0.
* **exchange**, an all-to-all: a shard has a part for each device, and part `part` travels to device
  ``(owner + part) % D``. At step i a device works on the part that it received from the device i
  places before it, while the sends of step i bring those of later steps.

Three patterns fill them in: ``one_way`` (a ring), ``two_way`` (half of every shard each way round
the ring), and ``direct`` (each shard straight from its owner, for switches that link every pair).
An exchange is direct. The rings are Looped CollectiveEinsum: Wang et al., "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Pattern = Literal["one_way", "two_way", "direct"]
Use = Literal["gather", "scatter", "exchange"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
USES: tuple[Use, ...] = get_args(Use)


class Chunk(NamedTuple):
    """Piece `part` of the shard that device ``(d + offset) % D`` owns, as device `d` names it."""

    offset: int
    part: int


class Send(NamedTuple):
    """Every device d passes `chunk` to device ``(d + hop) % D``, which names it `arrival`."""

    chunk: Chunk
    hop: int
    arrival: Chunk

    def permutation(self, devices: int) -> list[tuple[int, int]]:
        """(source, destination) pairs, one for every device."""
        return [(d, (d + self.hop) % devices) for d in range(devices)]


class Step(NamedTuple):
    """The multiplies of one step, and the sends in flight while they run."""

    multiply: tuple[Chunk, ...]
    sends: tuple[Send, ...]


@dataclass(frozen=True)
class Schedule:
    """All steps of one collective matmul on `devices` devices. Shards have `parts` equal parts."""

    use: Use
    pattern: Pattern
    devices: int
    parts: int
    steps: tuple[Step, ...]

    @property
    def permutes(self) -> int:
        """Sends of the whole schedule: the collective-permutes in the compiled program."""
        return sum(len(step.sends) for step in self.steps)

    @property
    def hops(self) -> int:
        """Transfers that the data of one chunk makes, one after another, at the most."""
        depth: dict[Chunk, int] = {}
        for step in self.steps:
            arrived = {send.arrival: depth.get(send.chunk, 0) + 1 for send in step.sends}
            for chunk, hops in arrived.items():
                depth[chunk] = max(depth.get(chunk, 0), hops)
        return max(depth.values(), default=0)

    def bytes_sent(self, chunk_bytes: int) -> int:
        """Bytes each device sends, for shards (or accumulators of a shard) of `chunk_bytes`."""
        return self.permutes * chunk_bytes // self.parts

    def chunks_used_after(self, i: int) -> set[Chunk]:
        """Chunks that a step later than i multiplies or sends."""
        later = self.steps[i + 1 :]
        return {chunk for step in later for chunk in step.multiply} | {
            send.chunk for step in later for send in step.sends
        }

    def part_bounds(self, size: int) -> list[tuple[int, int]]:
        """(start, stop) of each part along a shard's dimension of `size` rows."""
        return [
            (size * part // self.parts, size * (part + 1) // self.parts)
            for part in range(self.parts)
        ]

    def __str__(self) -> str:
        return draw(self)


def _send(chunk: Chunk, hop: int, devices: int) -> Send:
    return Send(chunk, hop, Chunk((chunk.offset - hop) % devices, chunk.part))


def _ring_step(
    use: Use, devices: int, i: int, direction: int, part: int
) -> tuple[Chunk, Send | None]:
    """Step i of one lane of a ring; data moves by `direction`, +1 or -1."""
    if use == "gather":
        chunk = Chunk(-direction * i % devices, part)
        return chunk, _send(chunk, direction, devices) if i < devices - 1 else None
    chunk = Chunk(direction * (devices - 1 - i) % devices, part)
    finished = Chunk(direction * (devices - i) % devices, part)
    return chunk, _send(finished, direction, devices) if i > 0 else None


def _direct_step(use: Use, devices: int, i: int) -> Step:
    """Step i of the direct pattern: offsets 0, 1, … gather; …, 1, 0 scatter; 0, D - 1, … exchange.

    A gather or an exchange keeps one more transfer in flight than it needs, so that no transfer
    has to end during the same multiply that it starts with.
    """
    if use != "scatter":
        started = [n for n in (range(1, 3) if i == 0 else range(i + 2, i + 3)) if n < devices]
        if use == "gather":
            sends = [_send(Chunk(0, 0), -offset, devices) for offset in started]
            return Step((Chunk(i, 0),), tuple(sends))
        sends = [_send(Chunk(0, part), part, devices) for part in started]
        return Step((Chunk(-i % devices, i),), tuple(sends))
    finished = Chunk(devices - i, 0)
    sends = [_send(finished, devices - i, devices)] if i > 0 else []
    return Step((Chunk(devices - 1 - i, 0),), tuple(sends))


@functools.cache
def make_schedule(use: Use, pattern: Pattern, devices: int) -> Schedule:
    """The schedule of `pattern` on `devices` devices.

    Args:
      use: "gather" moves shards, "scatter" moves accumulators, and "exchange" moves a part of each
        shard to each device, by the pattern "direct" only.
      pattern: "one_way", "two_way" or "direct".
      devices: D, at least 1. One device multiplies its own chunk and sends nothing.

    Raises:
      ValueError: for an unknown use or pattern, a ring that exchanges, or fewer than one device.
    """
    if use not in USES:
        raise ValueError(f"use={use!r}: expected one of {', '.join(USES)}")
    if pattern not in PATTERNS:
        raise ValueError(f"pattern={pattern!r}: expected one of {', '.join(PATTERNS)}")
    if use == "exchange" and pattern != "direct":
        raise ValueError(f"pattern={pattern!r}: an exchange has the pattern direct only")
    if devices < 1:
        raise ValueError(f"devices={devices}: a schedule needs at least 1 device")
    if pattern == "direct":
        steps = [_direct_step(use, devices, i) for i in range(devices)]
    else:
        # Shards that move by -1 come from the next device first, as the drawing shows.
        directions = enumerate((-1, 1) if pattern == "two_way" else (-1,))
        lanes = [
            [_ring_step(use, devices, i, *lane[::-1]) for i in range(devices)]
            for lane in directions
        ]
        steps = [_step(step) for step in zip(*lanes, strict=True)]
    parts = devices if use == "exchange" else 2 if pattern == "two_way" else 1
    return Schedule(use, pattern, devices, parts, tuple(steps))


def _step(lanes: Sequence[tuple[Chunk, Send | None]]) -> Step:
    return Step(
        tuple(chunk for chunk, _ in lanes), tuple(send for _, send in lanes if send is not None)
    )


def draw(schedule: Schedule) -> str:
    """A table of text, devices down and steps across.

    ``2 (2→0)`` reads: multiplies chunk 2 while it sends chunk 2 to device 0. Halves are 2a and 2b.
    In an exchange, chunk 2 is the part of it for the device that has, or receives it.
    """

    def name(chunk: Chunk, device: int) -> str:
        owner = (device + chunk.offset) % schedule.devices
        return f"{owner}{'ab'[chunk.part] if schedule.pattern == 'two_way' else ''}"

    def cell(step: Step, device: int) -> str:
        sends = [
            f"{name(send.chunk, device)}→{(device + send.hop) % schedule.devices}"
            for send in step.sends
        ]
        multiplies = " ".join(name(chunk, device) for chunk in step.multiply)
        return f"{multiplies} ({', '.join(sends)})" if sends else multiplies

    rows = [["", *(f"step {i}" for i in range(len(schedule.steps)))]]
    for device in range(schedule.devices):
        rows.append([f"device {device}", *(cell(step, device) for step in schedule.steps)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
