"""How a kernel cuts a matmul into tiles, and which cut is best for a matmul."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Literal

#: Warpgroups of a block that multiply; one more copies.
CONSUMERS = 2
#: Bytes of an element: bfloat16 or float16.
ITEMSIZE = 2
#: Rows of a plane are multiples of this: the copy engine sees shared memory in tiles so high.
ROW_MULTIPLE = 8
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
      swizzle: bytes over which shared memory is swizzled. The last axis of every slice must be a
        multiple of it, and 128 is read fastest.
      strips: strips of each consumer's part on their way to global memory.
      split: which side of the tile the two consumers halve.
      share: what the blocks of a cluster have in common: "w" makes two blocks neighbours along the
        rows, "x" along the columns, "both" four blocks along either; None launches no clusters.
      sweep: the side along which consecutive tiles follow each other.
      sweep_width: how many tiles a sweep is wide on its other side, so that what it reads stays in
        the L2 cache.
    """

    rows: int = 128
    columns: int = 256
    contracted: int = 64
    stages: int = 4
    swizzle: Literal[64, 128] = 128
    strips: int = 2
    split: Literal["rows", "columns"] = "rows"
    share: Literal["x", "w", "both"] | None = "w"
    sweep: Literal["rows", "columns"] = "rows"
    sweep_width: int = 8

    @property
    def cluster(self) -> tuple[int, int]:
        """Blocks of a cluster along the rows, and along the columns."""
        return 2 if self.share in ("w", "both") else 1, 2 if self.share in ("x", "both") else 1

    @property
    def part(self) -> tuple[int, int]:
        """(rows, columns) of a consumer's part of a tile."""
        if self.split == "rows":
            return self.rows // CONSUMERS, self.columns
        return self.rows, self.columns // CONSUMERS

    @property
    def strip_columns(self) -> int:
        """Columns of a strip: as many as a swizzle covers, and a divisor of the part's."""
        return 64 if self.part[1] % 64 == 0 else 32

    @property
    def all_strips(self) -> int:
        """Strips of a consumer's part."""
        return self.part[1] // self.strip_columns

    @property
    def shared_memory_bytes(self) -> int:
        """What the stages and the outgoing strips take."""
        stage = (self.rows + self.columns) * self.contracted
        strip = CONSUMERS * self.part[0] * self.strip_columns
        return ITEMSIZE * (self.stages * stage + self.strips * strip)


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
    """

    batch: int
    rows: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    contracted_planes: int = 1
    x_contracted: Literal[1, 2] = 2
    w_contracted: Literal[1, 2] = 1

    def swizzles(self, tiles: Tiles) -> bool:
        """Whether the copy engine can swizzle every slice: all last axes are made of whole ones."""
        last = [
            *((tiles.contracted, *self.contracted) if self.x_contracted == 2 else (self.rows,)),
            *((tiles.columns, *self.columns) if self.w_contracted == 1 else self.contracted),
        ]
        if any(size % (tiles.swizzle // ITEMSIZE) for size in last):
            return False
        if any(columns % tiles.strip_columns for columns in self.columns):
            return False
        return all(size % ROW_MULTIPLE == 0 for size in (self.rows, *self.contracted))


# Microseconds in which one multiprocessor of an H200 multiplies a tile's slices of 64, when all of
# them are busy, by the tile's area in units of 128 × 128.
_STEP_MICROSECONDS = 0.365
_TILE_MICROSECONDS = 1.5
_LAUNCH_MICROSECONDS = 4.0
_MEMORY_BYTES_PER_MICROSECOND = 3.5e6


_SIZES = (
    Tiles(128, 256, split="rows"),
    Tiles(256, 128, split="rows"),
    Tiles(128, 224, split="rows"),
    Tiles(128, 128, split="rows"),
    Tiles(128, 256, split="columns"),
    Tiles(128, 128, split="columns"),
)


def predicted_microseconds(problem: Problem, tiles: Tiles, multiprocessors: int = 132) -> float:
    """What a launch should take: whole waves of tiles, one tile to a multiprocessor."""
    down_blocks, across_blocks = tiles.cluster
    down = math.ceil(problem.rows / (tiles.rows * down_blocks))
    across = sum(math.ceil(n / (tiles.columns * across_blocks)) for n in problem.columns)
    clusters = multiprocessors // (down_blocks * across_blocks)
    waves = math.ceil(problem.batch * down * across / clusters)
    steps = problem.contracted_planes * sum(
        math.ceil(size / tiles.contracted) for size in problem.contracted
    )
    area = tiles.rows * tiles.columns * tiles.contracted / (128 * 128 * 64)
    return _LAUNCH_MICROSECONDS + waves * (steps * area * _STEP_MICROSECONDS + _TILE_MICROSECONDS)


def candidates(problem: Problem) -> list[Tiles]:
    """Cuts worth considering for a problem, with as many stages as fit; maybe none."""
    found = []
    for sizes, share in itertools.product(_SIZES, ("w", None, "both", "x")):
        # Wider swizzles are read faster.
        swizzled = (replace(sizes, share=share, swizzle=swizzle) for swizzle in (128, 64))
        tiles = next(filter(problem.swizzles, swizzled), None)
        if tiles is not None:
            found += _with_most_stages(replace(tiles, strips=min(2, tiles.all_strips)))
    return found


def _with_most_stages(tiles: Tiles) -> list[Tiles]:
    staged = (replace(tiles, stages=stages) for stages in (6, 5, 4, 3))
    return [t for t in staged if t.shared_memory_bytes <= SHARED_MEMORY_BYTES][:1]


def choose_tiles(problem: Problem) -> Tiles | None:
    """The tuned cut of this very problem, else the one predicted to be fastest.

    None where no cut fits, or where XLA's matmul was measured to be faster even with the copies
    that it needs and the kernel does not.
    """
    if problem in _tuned():
        tiles, microseconds, library_microseconds = _tuned()[problem]
        library_microseconds += _copying_microseconds(problem)
        return tiles if microseconds < library_microseconds else None
    found = candidates(problem)
    if not found:
        return None
    return min(found, key=lambda tiles: predicted_microseconds(problem, tiles))


def _copying_microseconds(problem: Problem) -> float:
    """What one pass takes that moves the result, or an operand as large, between arrays."""
    rows = problem.batch * problem.rows
    if problem.x_contracted == 1:
        # Gathered chunks would be joined.
        rows = problem.contracted_planes * sum(problem.contracted)
    return 2 * ITEMSIZE * rows * max(problem.columns) / _MEMORY_BYTES_PER_MICROSECOND


@functools.cache
def _tuned() -> dict[Problem, tuple[Tiles, float, float]]:
    lines = (
        resources.files("collective_matmul.data")
        .joinpath("h200/matmul_tilings.jsonl")
        .read_text()
        .splitlines()
    )
    return dict(map(_entry, map(json.loads, lines)))


def _entry(line: dict[str, Any]) -> tuple[Problem, tuple[Tiles, float, float]]:
    sizes = {name: tuple(line["problem"][name]) for name in ("contracted", "columns")}
    problem = Problem(**{**line["problem"], **sizes})
    return problem, (Tiles(**line["tiles"]), line["microseconds"], line["library_microseconds"])


def as_json(problem: Problem, tiles: Tiles, **measured: float) -> str:
    """A line of the table of tuned cuts."""
    defaults = asdict(Tiles())
    changed = {name: v for name, v in asdict(tiles).items() if v != defaults[name]}
    return json.dumps({"problem": asdict(problem), "tiles": changed, **measured})
