"""Tilings of the matmul kernel, and the best one for a problem.

Tuning parameters are named as in JAX's Hopper matmul (`jax.experimental.pallas.ops.gpu`), with one
difference: `tile_m` and `tile_n` are the tile of a whole block, both of its consumers together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from collective_matmul import data

#: Consumer warpgroups of a block, which multiply. One more warpgroup, the producer, loads.
CONSUMERS = 2
#: Bytes of an element: bfloat16 or float16.
ITEMSIZE: Literal[2] = 2
#: The rows of a plane are a multiple of this: the height of the tiles in which TMA sees memory.
ROW_MULTIPLE = 8
#: Bytes of shared memory of a Hopper block, without what barriers and alignment take.
SHARED_MEMORY_BYTES = 232_448 - 2_048


@dataclass(frozen=True)
class Tiling:
    """The tiling of a matmul x [m, k] @ w [k, n].

    Attributes:
      tile_m: rows of a block's tile of the result.
      tile_n: columns of a block's tile of the result.
      tile_k: the part of the contraction that one pipeline stage holds.
      max_concurrent_steps: pipeline stages, each with a k-block of both operands.
      swizzle: bytes over which shared memory is swizzled. The last axis of every k-block must be a
        multiple of it. 128 is read fastest.
      epilogue_stages: epilogue tiles of each consumer that are in shared memory at once.
      wg_dimension: the side of the tile that is divided between the two consumers.
      cluster_dimension: the sides along which the blocks of a cluster are neighbours. Two blocks
        along m multicast w to each other, two along n multicast x, four along "mn" both. None
        launches no clusters.
      grid_minor_dim: the side along which consecutive tiles follow each other.
      grid_tile_width: the width, in tiles, of the stripes on the other side in which tiles are
        visited, so that what a stripe reads stays in the L2 cache.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    max_concurrent_steps: int = 4
    swizzle: Literal[64, 128] = 128
    epilogue_stages: int = 2
    wg_dimension: Literal["m", "n"] = "m"
    cluster_dimension: Literal["m", "n", "mn"] | None = "m"
    grid_minor_dim: Literal["m", "n"] = "m"
    grid_tile_width: int = 8

    def to_json(self) -> dict[str, Any]:
        """The tiling as JSON values."""
        return asdict(self)

    @property
    def cluster(self) -> tuple[int, int]:
        """Blocks of a cluster along m and along n."""
        dimensions = self.cluster_dimension or ""
        return 2 if "m" in dimensions else 1, 2 if "n" in dimensions else 1

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """(rows, columns) of one consumer's part of a tile."""
        if self.wg_dimension == "m":
            return self.tile_m // CONSUMERS, self.tile_n
        return self.tile_m, self.tile_n // CONSUMERS

    @property
    def epilogue_tile_n(self) -> int:
        """Columns of an epilogue tile: a swizzle's width that divides the warpgroup's tile."""
        return 64 if self.warpgroup_tile[1] % 64 == 0 else 32

    @property
    def epilogue_tiles_per_warpgroup(self) -> int:
        """Epilogue tiles, side by side, that one consumer's part of a tile is stored in."""
        return self.warpgroup_tile[1] // self.epilogue_tile_n

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of all pipeline stages and epilogue stages, in half precision."""
        return self.shared_memory_bytes_of(ITEMSIZE)

    def shared_memory_bytes_of(self, itemsize: int) -> int:
        """Bytes of all stages, for operands whose elements have `itemsize` bytes."""
        step = (self.tile_m + self.tile_n) * self.tile_k
        epilogue_tile = CONSUMERS * self.warpgroup_tile[0] * self.epilogue_tile_n
        operands = itemsize * self.max_concurrent_steps * step
        return operands + ITEMSIZE * self.epilogue_stages * epilogue_tile


@dataclass(frozen=True)
class MatmulProblem:
    """The shapes of one launch of the kernel.

    Attributes:
      batch: planes of each result.
      m: rows of each result.
      k: for each term of the sum, the size contracted within a plane.
      n: the columns of each result.
      contracted_planes: planes summed over.
      x_contracted_axis: the contracted axis of x's planes: 2, or 1 for a transposed x.
      w_contracted_axis: the contracted axis of w's planes: 1, or 2 for a transposed w.
      reads_block: whether x is a block of the columns of a larger array, so that no k-block may
        reach beyond k.
      writes_block: the same for the results, so that no tile may reach beyond n.
      itemsize: bytes of an element of the operands.
    """

    batch: int
    m: int
    k: tuple[int, ...]
    n: tuple[int, ...]
    contracted_planes: int = 1
    x_contracted_axis: Literal[1, 2] = 2
    w_contracted_axis: Literal[1, 2] = 1
    reads_block: bool = False
    writes_block: bool = False
    itemsize: Literal[1, 2] = ITEMSIZE

    @property
    def bytes_contracted(self) -> int:
        """Bytes of a row of x that are contracted within a plane, of all terms together."""
        return self.itemsize * sum(self.k)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> MatmulProblem:
        """Reads what `dataclasses.asdict` and JSON have made of a problem."""
        return cls(**{**fields, "k": tuple(fields["k"]), "n": tuple(fields["n"])})

    def fits(self, tiling: Tiling) -> bool:
        """Whether a launch can have this tiling."""
        if self.reads_block and any(k % tiling.tile_k for k in self.k):
            return False
        if self.writes_block and any(n % (tiling.tile_n * tiling.cluster[1]) for n in self.n):
            return False
        return self.can_swizzle(tiling)

    def can_swizzle(self, tiling: Tiling) -> bool:
        """Whether TMA can swizzle every k-block: all last axes are multiples of the swizzle."""
        last = [
            *((tiling.tile_k, *self.k) if self.x_contracted_axis == 2 else (self.m,)),
            *((tiling.tile_n, *self.n) if self.w_contracted_axis == 1 else self.k),
        ]
        if any(size % (tiling.swizzle // self.itemsize) for size in last):
            return False
        if any(n % tiling.epilogue_tile_n for n in self.n):
            return False
        return all(size % ROW_MULTIPLE == 0 for size in (self.m, *self.k))


# The cost model, fitted to measurements on an H200.
# Microseconds in which one multiprocessor multiplies a 128 × 128 tile's k-block of 128 bytes, when
# all multiprocessors are busy. Other sizes count by their area.
_STEP_MICROSECONDS = 0.365
# Tiles of 128 × 128 take this much longer for their area: they load more for each product.
_SMALL_TILE_SLOWDOWN = 1.05
_TILE_MICROSECONDS = 1.5
_LAUNCH_MICROSECONDS = 4.0
_MEMORY_BYTES_PER_MICROSECOND = 3.5e6

_TILE_SIZES = (
    Tiling(128, 256, wg_dimension="m"),
    Tiling(256, 128, wg_dimension="m"),
    Tiling(128, 224, wg_dimension="m"),
    Tiling(128, 128, wg_dimension="m"),
    Tiling(128, 256, wg_dimension="n"),
    Tiling(128, 128, wg_dimension="n"),
)


def predicted_microseconds(
    problem: MatmulProblem, tiling: Tiling, multiprocessors: int = 132
) -> float:
    """Predicted microseconds of a launch: whole waves of tiles, one tile per multiprocessor."""
    cluster_m, cluster_n = tiling.cluster
    grid_m = math.ceil(problem.m / (tiling.tile_m * cluster_m))
    grid_n = sum(math.ceil(n / (tiling.tile_n * cluster_n)) for n in problem.n)
    clusters = multiprocessors // (cluster_m * cluster_n)
    waves = math.ceil(problem.batch * grid_m * grid_n / clusters)
    steps = problem.contracted_planes * sum(math.ceil(k / tiling.tile_k) for k in problem.k)
    area = tiling.tile_m * tiling.tile_n * problem.itemsize * tiling.tile_k / 128**3
    if tiling.tile_m * tiling.tile_n <= 128 * 128:
        area *= _SMALL_TILE_SLOWDOWN
    return _LAUNCH_MICROSECONDS + waves * (steps * area * _STEP_MICROSECONDS + _TILE_MICROSECONDS)


def candidate_tilings(problem: MatmulProblem) -> list[Tiling]:
    """Tilings worth measuring for a problem, with as many stages as fit. The list may be empty."""
    found = []
    for sizes, dimension in itertools.product(_TILE_SIZES, ("m", None, "mn", "n")):
        # Wider swizzles are read faster.
        swizzled = (
            replace(sizes, cluster_dimension=dimension, swizzle=swizzle) for swizzle in (128, 64)
        )
        tiling = next(filter(problem.fits, swizzled), None)
        if tiling is not None:
            epilogue_stages = min(2, tiling.epilogue_tiles_per_warpgroup)
            found += _with_most_stages(replace(tiling, epilogue_stages=epilogue_stages))
    return found


def _with_most_stages(tiling: Tiling) -> list[Tiling]:
    staged = (replace(tiling, max_concurrent_steps=stages) for stages in (6, 5, 4, 3))
    return [t for t in staged if t.shared_memory_bytes <= SHARED_MEMORY_BYTES][:1]


def choose_tiling(problem: MatmulProblem) -> Tiling | None:
    """The tiling measured to be fastest for this problem, else the one predicted to be.

    Returns:
      None if no tiling fits, or if XLA's matmul was measured to be faster, even with the copies
      that it needs and the kernel does not.
    """
    measured = measured_tilings().get(replace(problem, reads_block=False, writes_block=False))
    if measured is not None and problem.fits(measured.tiling):
        xla_microseconds = measured.xla_microseconds + _copying_microseconds(problem)
        return measured.tiling if measured.microseconds < xla_microseconds else None
    found = candidate_tilings(problem)
    if not found:
        return None
    return min(found, key=lambda tiling: predicted_microseconds(problem, tiling))


def _copying_microseconds(problem: MatmulProblem) -> float:
    """Predicted microseconds of one copy of the result, or of an operand as large."""
    rows = problem.batch * problem.m
    if problem.x_contracted_axis == 1:
        # Gathered chunks would be concatenated.
        rows = problem.contracted_planes * sum(problem.k)
    return 2 * ITEMSIZE * rows * max(problem.n) / _MEMORY_BYTES_PER_MICROSECOND


class MeasuredTiling(NamedTuple):
    """The fastest tiling of a problem, its microseconds, and those of XLA's matmul."""

    tiling: Tiling
    microseconds: float
    xla_microseconds: float

    def record(self, problem: MatmulProblem) -> data.Record:
        """The record of the shipped table."""
        microseconds = {"kernel": self.microseconds, "xla": self.xla_microseconds}
        fields = asdict(problem)
        del fields["reads_block"], fields["writes_block"]  # Blocks have the tiling of the whole.
        return data.Record(fields, microseconds, asdict(self.tiling))

    @classmethod
    def from_record(cls, record: data.Record) -> MeasuredTiling:
        """Reads what `record` returned."""
        assert record.config is not None
        took = record.microseconds
        return cls(Tiling(**record.config), took["kernel"], took["xla"])


@functools.cache
def measured_tilings() -> Mapping[MatmulProblem, MeasuredTiling]:
    """The shipped table: the fastest tiling of each problem measured on an H200."""
    table = data.shipped("NVIDIA H200", "matmul_tilings")
    assert table is not None
    return {
        MatmulProblem.from_json(record.problem): MeasuredTiling.from_record(record)
        for record in table.records
    }
