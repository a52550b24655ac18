"""What the plans of all fused kernels share: cuts, what limits them, their order, measured ones.

A kernel has many feasible plans. A model puts them in order; `python -m benchmarks plans`
measures the likeliest, and tuned_plans.jsonl keeps the fastest.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Literal, Protocol, TypeVar

from collective_matmul.mosaic_gpu.tiling import (
    CONSUMERS,
    ITEMSIZE,
    Problem,
    Tiles,
    predicted_microseconds,
)

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]

_SIZES = (
    Tiles(128, 256, split="rows"),
    Tiles(256, 128, split="rows"),
    Tiles(128, 224, split="rows"),
    Tiles(128, 192, split="rows"),
    Tiles(128, 128, split="rows"),
    Tiles(128, 64, split="rows"),
    Tiles(64, 256, split="columns"),
    Tiles(64, 128, split="columns"),
    Tiles(64, 64, split="columns"),
)
# Four blocks of a cluster do not all fit into what pairs leave of an odd number of pairs.
_SHARES: tuple[Literal["w", "x"] | None, ...] = (None, "w", "x")
_SWIZZLES: tuple[Literal[128, 64], ...] = (128, 64)
_STAGES = (8, 7, 6, 5, 4, 3)
# How many tiles wide a sweep may be.
_SWEEP_WIDTHS = (8, 4, 16)

# Of an H200: what the copy engine of a multiprocessor reads out of the L2 cache, by the swizzle: a
# row of it each nanosecond.
_READ_BYTES_PER_MICROSECOND = {128: 1.2e5, 64: 6e4}
# What its matmul reads from memory, and what lies in its L2.
_MEMORY_BYTES_PER_MICROSECOND = 4e6
_CACHE_BYTES = 40e6
# Multiplying and moving slices into and out of shared memory get in each other's way: so much of
# what a matmul takes depends on the tiles' area alone, the rest on what a multiprocessor moves.
_MULTIPLYING = 0.65
_SHARED_BYTES_PER_MICROSECOND = 5e5
# Rows of one multiply (wgmma), which reads both its operands from shared memory.
_MULTIPLY_ROWS = 64
# From one tile to the next, beyond what a matmul without peers takes.
_TILE_MICROSECONDS = 1.5
#: With NVLink 4: what leaves a device.
LINK_BYTES_PER_MICROSECOND = 3.5e5
#: From the first copy out of a device to the first that a peer does with it.
ARRIVAL_MICROSECONDS = 5.0
#: So long everything else takes while a device sends, and receives, where power limits the clocks.
SENT_BYTES_PER_MICROSECOND = 1e6

# By so much less is hoped of a plan for each one of the same sizes that comes before it.
_DOUBT = 1.08
# What follows from the number of rows.
_BY_ROWS = frozenset(
    {"stages", "strips", "swizzle", "slabs", "box", "boxes_per_message", "passes", "owned_rows"}
)


class Plan(Protocol):
    """One cut of a call."""

    @property
    def choices(self) -> dict[str, Any]:
        """All that distinguishes it from other plans of the same call, as JSON has it."""
        ...


P = TypeVar("P", bound=Plan)


def cuts(fits: Callable[[Tiles], bool], all_strips: bool = False) -> list[Tiles]:
    """Tiles of all sizes in all clusters, each with the widest swizzle and most stages that fit.

    Args:
      fits: whether a cut is feasible.
      all_strips: whether a tile leaves shared memory from as many strips as it has.
    """
    found = []
    for sizes, share in itertools.product(_SIZES, _SHARES):
        counts = (sizes.all_strips,) if all_strips else (2, 1)
        staged = (
            replace(sizes, share=share, swizzle=swizzle, stages=stages, strips=strips)
            for swizzle, stages, strips in itertools.product(_SWIZZLES, _STAGES, counts)
            if strips <= sizes.all_strips
        )
        found += itertools.islice(filter(fits, staged), 1)
    return found


def swept(tiles: Tiles, wide: int, long: int) -> list[Tiles]:
    """The same tiles in other orders than the usual one.

    Args:
      tiles: of a plan.
      wide: how many there are on the side that a sweep's width is counted along.
      long: on the other.
    """
    if long == 1:
        return []
    # All widths beyond the last tile are one.
    widths = {min(width, wide): width for width in _SWEEP_WIDTHS}
    widths.pop(min(tiles.sweep_width, wide), None)
    return [replace(tiles, sweep_width=width) for width in widths.values()]


def computing_microseconds(problem: Problem, tiles: Tiles, multiprocessors: int = 132) -> float:
    """What a launch takes that has all its operands: of whatever limits it, the slowest."""
    waves = _waves(problem, tiles, multiprocessors)
    rows, columns = tiles.part
    multiplied = CONSUMERS * (rows + columns * rows // _MULTIPLY_ROWS)
    moved = min(tiles.rows, problem.rows) + tiles.columns + multiplied
    moving = waves * ITEMSIZE * sum(problem.contracted) * moved / _SHARED_BYTES_PER_MICROSECOND
    multiplying = _MULTIPLYING * predicted_microseconds(problem, tiles, multiprocessors)
    weights = ITEMSIZE * sum(problem.contracted) * sum(problem.columns)
    passes = problem.batch if weights > _CACHE_BYTES else 1
    reading = _reading_microseconds(problem, tiles, multiprocessors)
    slowest = max(
        multiplying + moving + waves * _TILE_MICROSECONDS,
        reading,
        passes * weights / _MEMORY_BYTES_PER_MICROSECOND,
    )
    # Of cuts as fast, that which reads least leaves most to what is sent and received.
    return slowest + reading / 10


def _reading_microseconds(problem: Problem, tiles: Tiles, multiprocessors: int = 132) -> float:
    """What a launch takes if it waits for slices of its operands, which come out of the L2."""
    down, across = tiles.cluster
    rows = min(tiles.rows, problem.rows) / across
    # What several blocks share is read once.
    columns = tiles.columns / min(down, math.ceil(problem.rows / tiles.rows))
    lines = _waves(problem, tiles, multiprocessors) * ITEMSIZE * sum(problem.contracted)
    return lines * (rows + columns) / _READ_BYTES_PER_MICROSECOND[tiles.swizzle]


def _waves(problem: Problem, tiles: Tiles, multiprocessors: int) -> int:
    """How many tiles follow each other on the multiprocessor that has most."""
    down, across = tiles.cluster
    rows = math.ceil(problem.rows / (tiles.rows * down))
    columns = sum(math.ceil(size / (tiles.columns * across)) for size in problem.columns)
    return math.ceil(problem.batch * rows * columns / (multiprocessors // (down * across)))


def in_order(
    plans: Iterable[P],
    predicted: Callable[[P], float],
    sizes: Callable[[P], Hashable],
    vary: Callable[[P], Iterable[P]],
) -> tuple[P, ...]:
    """Plans, and variations that the model does not tell apart, the likeliest fastest first.

    Args:
      plans: in any order.
      predicted: what each should take.
      sizes: by which plans differ most. The best of each comes early: models err about them.
      vary: variations of a plan.
    """
    alike: dict[Hashable, list[P]] = {}
    for plan in sorted(plans, key=predicted):
        alike.setdefault(sizes(plan), []).append(plan)
    hopes = [
        (predicted(plan) * _DOUBT**number, plan)
        for ranked in alike.values()
        for number, plan in enumerate(itertools.chain(ranked, *map(vary, ranked)))
    ]
    return tuple(plan for _, plan in sorted(hopes, key=lambda found: found[0]))


@dataclass(frozen=True)
class Call:
    """What a plan is wanted for.

    Attributes:
      op: its name.
      shapes: of its operands: a dataclass of numbers and tuples of them, `rows` among them.
      multiprocessors: of each GPU.
    """

    op: Op
    shapes: Any
    multiprocessors: int

    def line(self, plan: Plan, microseconds: float) -> str:
        """Its line in the table: the fastest plan, and what that took."""
        measured = {"plan": plan.choices, "microseconds": round(microseconds, 1)}
        return json.dumps({**asdict(self), **measured})

    def choose(self, plans: Sequence[P]) -> P | None:
        """Of all feasible plans, the likeliest first: the measured one, or the first; or None.

        What is fastest for twice as many rows, or half, was measured to lose more than the
        likeliest plan does.
        """
        wanted = _tuned().get(_key(json.loads(json.dumps(asdict(self)))))
        measured = (plan for plan in plans if wanted and plan.choices == wanted)
        return next(itertools.chain(measured, plans), None)


def lasting(choices: dict[str, Any]) -> dict[str, Any]:
    """Choices without those that follow from the number of rows."""
    return {
        name: lasting(value) if isinstance(value, dict) else value
        for name, value in choices.items()
        if name not in _BY_ROWS
    }


def _key(call: dict[str, Any]) -> tuple[str, int]:
    """What a call, as JSON has it, is found and sorted by; its number of rows comes last."""
    shapes = {name: size for name, size in call["shapes"].items() if name != "rows"}
    return json.dumps([call["op"], call["multiprocessors"], shapes]), call["shapes"]["rows"]


def merged(*tables: str) -> str:
    """One table, as text, of several: of the lines for one call the last counts."""
    lines = {}
    for line in itertools.chain(*map(str.splitlines, tables)):
        lines[_key(json.loads(line))] = line
    return "".join(f"{lines[key]}\n" for key in sorted(lines))


def tuned_plans() -> str:
    """The table that comes with the package, as text: JSON, line by line."""
    return (
        resources.files("collective_matmul.data").joinpath("h200/fused_configs.jsonl").read_text()
    )


@functools.cache
def _tuned() -> dict[tuple[str, int], dict[str, Any]]:
    """The choices measured to be fastest, by calls."""
    return {_key(line): line["plan"] for line in map(json.loads, tuned_plans().splitlines())}
