"""How a kernel cuts a matmul into tiles, and which cut is best for a matmul."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Literal

#: Warpgroups of a block that multiply; one more copies.
CONSUMERS = 2
#: Rows of shared memory are swizzled over 128 bytes, 64 elements of two bytes.
SWIZZLE_BYTES = 128
SWIZZLE_ELEMENTS = SWIZZLE_BYTES // 2
#: A tile of the product leaves through shared memory in strips of this many columns.
STRIP_COLUMNS = 64
#: Shared memory of a Hopper block, less what barriers and alignment take.
SHARED_MEMORY_BYTES = 232_448 - 2_048


@dataclass(frozen=True)
class Tiles:
    """The cut of one matmul.

    Attributes:
      rows: rows of a block's tile of the product.
      columns: columns of a block's tile of the product.
      contracted: how much of the contraction one stage holds.
      stages: slices of both operands in flight.
      strips: strips of each consumer's half on their way to global memory; with an addend, all.
      split: which side of the tile the two consumers halve.
      share: the operand that the two blocks of a cluster have in common: "w" makes them neighbours
        along the rows, "x" along the columns; None launches no clusters.
      sweep: the side along which consecutive tiles follow each other.
      sweep_width: how many tiles a sweep is wide on its other side, so that what it reads stays in
        the L2 cache.
    """

    rows: int = 128
    columns: int = 256
    contracted: int = 64
    stages: int = 4
    strips: int = 2
    split: Literal["rows", "columns"] = "rows"
    share: Literal["x", "w"] | None = "w"
    sweep: Literal["rows", "columns"] = "rows"
    sweep_width: int = 8

    @property
    def cluster(self) -> int:
        """Blocks in a cluster."""
        return 1 if self.share is None else 2

    @property
    def half(self) -> tuple[int, int]:
        """(rows, columns) of a consumer's part of the tile."""
        if self.split == "rows":
            return self.rows // CONSUMERS, self.columns
        return self.rows, self.columns // CONSUMERS

    @property
    def shared_memory_bytes(self) -> int:
        """What the stages and the outgoing strips take, of elements of two bytes."""
        stage = (self.rows + self.columns) * self.contracted
        strip = CONSUMERS * self.half[0] * STRIP_COLUMNS
        return 2 * (self.stages * stage + self.strips * strip)


@dataclass(frozen=True)
class Problem:
    """The shapes of one launch of the kernel.

    Attributes:
      batch: planes of each result.
      rows: rows of each result.
      contracted: the size summed over within a plane, of each term.
      columns: columns of each result.
      contracted_planes: planes summed over.
      x_contracted: the axis of x's planes that is summed over: 2, or 1 for a transposed x.
      w_contracted: that of w's: 1, or 2 for a transposed w.
      addends: whether something is added to each result.
    """

    batch: int
    rows: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    contracted_planes: int = 1
    x_contracted: Literal[1, 2] = 2
    w_contracted: Literal[1, 2] = 1
    addends: bool = False

    @property
    def aligned(self) -> bool:
        """Whether the copy engine can swizzle every slice: its last axis comes in whole swizzles."""
        x_last = self.contracted if self.x_contracted == 2 else (self.rows,)
        w_last = self.columns if self.w_contracted == 1 else self.contracted
        rows = self.contracted if self.x_contracted == 1 else (self.rows,)
        return all(size % SWIZZLE_ELEMENTS == 0 for size in (*x_last, *w_last, *self.columns)) and (
            all(size % 8 == 0 for size in (*rows, self.rows, *self.contracted))
        )


# Microseconds of one step of 64 on one multiprocessor of an H200 under full load, by the size of the
# tile; measured within whole waves.
_STEP_MICROSECONDS = {(128, 256): 0.725, (256, 128): 0.725, (128, 128): 0.373}
_TILE_MICROSECONDS = 1.0
_LAUNCH_MICROSECONDS = 4.0


def predicted_microseconds(problem: Problem, tiles: Tiles, multiprocessors: int = 132) -> float:
    """What a launch should take: whole waves of tiles, one tile to a multiprocessor."""
    down = math.ceil(problem.rows / (tiles.rows * (2 if tiles.share == "w" else 1)))
    width = tiles.columns * (2 if tiles.share == "x" else 1)
    across = sum(math.ceil(columns / width) for columns in problem.columns)
    waves = math.ceil(problem.batch * down * across / (multiprocessors // tiles.cluster))
    steps = problem.contracted_planes * sum(
        math.ceil(size / tiles.contracted) for size in problem.contracted
    )
    step = _STEP_MICROSECONDS[tiles.rows, tiles.columns] * tiles.contracted / 64
    return _LAUNCH_MICROSECONDS + waves * (steps * step + _TILE_MICROSECONDS)


def candidates(problem: Problem) -> Iterator[Tiles]:
    """Cuts worth trying, what measured best first; a pair shares the operand that is read most."""
    wide = Tiles(128, 256) if problem.w_contracted == 1 else Tiles(256, 128, strips=1)
    for tiles in (wide, replace(wide, share=None), Tiles(128, 128, stages=6, share=None)):
        if problem.addends:
            strips = tiles.half[1] // STRIP_COLUMNS
            tiles = replace(tiles, strips=strips, stages=3 if tiles.columns != tiles.rows else 6)
        yield tiles


def choose_tiles(problem: Problem) -> Tiles:
    """The tuned cut of this very problem, else the one predicted to be fastest."""
    tuned = _tuned().get(problem)
    return tuned or min(candidates(problem), key=lambda t: predicted_microseconds(problem, t))


@functools.cache
def _tuned() -> dict[Problem, Tiles]:
    lines = resources.files(__package__).joinpath("tuned_tiles.jsonl").read_text().splitlines()
    return dict(map(_entry, map(json.loads, lines)))


def _entry(line: dict[str, Any]) -> tuple[Problem, Tiles]:
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in line["problem"].items()}
    return Problem(**fields), Tiles(**line["tiles"])


def as_json(problem: Problem, tiles: Tiles, **measured: float) -> str:
    """A line of the table of tuned cuts."""
    defaults = asdict(Tiles())
    changed = {name: v for name, v in asdict(tiles).items() if v != defaults[name]}
    return json.dumps({"problem": asdict(problem), "tiles": changed, **measured})
