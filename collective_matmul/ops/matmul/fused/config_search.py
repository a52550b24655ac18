"""Configurations of all fused kernels: feasible tilings, a cost model, ranking, measured ones.

A kernel has many feasible configurations. A model ranks them; `python -m benchmarks configs`
measures the likeliest, and data/<device>/fused_configs.jsonl keeps the fastest.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from collective_matmul import data
from collective_matmul.dispatch.contract import Configuration
from collective_matmul.hardware import HOPPER
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import ScaledParts, can_scale
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    CONSUMERS,
    ITEMSIZE,
    ROW_MULTIPLE,
    MatmulProblem,
    Tiling,
    predicted_microseconds,
)
from collective_matmul.ops.matmul.request import Op

_TILE_SIZES = (
    Tiling(128, 256, wg_dimension="m"),
    Tiling(256, 128, wg_dimension="m"),
    Tiling(128, 224, wg_dimension="m"),
    Tiling(128, 192, wg_dimension="m"),
    Tiling(128, 128, wg_dimension="m"),
    Tiling(128, 64, wg_dimension="m"),
    Tiling(64, 256, wg_dimension="n"),
    Tiling(64, 128, wg_dimension="n"),
    Tiling(64, 64, wg_dimension="n"),
)
# Not "mn": a GPC may have an odd number of pairs of multiprocessors, so that clusters of four would
# not all be resident at once, as peers expect.
_CLUSTER_DIMENSIONS: tuple[Literal["m", "n"] | None, ...] = (None, "m", "n")
_SWIZZLES: tuple[Literal[128, 64], ...] = (128, 64)
_STAGES = (8, 7, 6, 5, 4, 3)
_GRID_TILE_WIDTHS = (8, 4, 16)

# The cost model, fitted to measurements on H200s.
# What TMA of one multiprocessor reads from the L2 cache, by swizzle: a row of it per nanosecond.
_READ_BYTES_PER_MICROSECOND = {128: 1.2e5, 64: 6e4}
# What a matmul reads from memory, and what fits into the L2 cache.
_MEMORY_BYTES_PER_MICROSECOND = 4e6
_CACHE_BYTES = 40e6
# wgmma and the copies into and out of shared memory slow each other down. This share of a matmul's
# time depends on the area of its tiles alone, the rest on the bytes that a multiprocessor moves.
_MMA_SHARE = 0.65
_SHARED_BYTES_PER_MICROSECOND = 5e5
# Rows of one wgmma, which reads both its operands from shared memory.
_WGMMA_ROWS = 64
# Time in 8 bits relative to as many bytes in half precision, with the same tiles. So matmuls take
# what was measured without communication: 0.56 and 0.74 of half precision's time.
_SLOWDOWN_OF_SCALES: Mapping[ScaledParts, float] = {"rows": 1.05, "blocks": 1.2}
# From one tile to the next, in addition to what a matmul without communication takes.
_TILE_MICROSECONDS = 1.5
#: What a GPU sends over NVLink 4.
LINK_BYTES_PER_MICROSECOND = 3.5e5
#: From the first copy that leaves a GPU until a peer first uses what it brought.
ARRIVAL_MICROSECONDS = 5.0
#: While power limits the clocks, a GPU that sends and receives this much computes a microsecond
#: longer.
SENT_BYTES_PER_MICROSECOND = 1e6

# Configurations with the same tile sizes are ranked as if each took this much longer than predicted
# for every better one before it.
_DOUBT = 1.08


C = TypeVar("C", bound=Configuration)


def feasible_tilings(
    fits: Callable[[Tiling], bool],
    scales: ScaledParts | None = None,
    *,
    all_epilogue_tiles: bool = False,
) -> list[Tiling]:
    """Tilings of all sizes and clusters, each with the widest swizzle and most stages that fit.

    Args:
      fits: whether a tiling is feasible.
      scales: the parts of 8-bit operands that have scales, or None in half precision.
      all_epilogue_tiles: whether all of a tile's epilogue tiles are in shared memory at once.
    """
    found, all_sizes = [], _TILE_SIZES
    if scales is not None:
        in_bytes = (replace(sizes, tile_k=ITEMSIZE * sizes.tile_k) for sizes in _TILE_SIZES)
        all_sizes = tuple(sizes for sizes in in_bytes if can_scale(sizes, scales))
    for sizes, dimension in itertools.product(all_sizes, _CLUSTER_DIMENSIONS):
        counts = (sizes.epilogue_tiles_per_warpgroup,) if all_epilogue_tiles else (2, 1)
        staged = (
            replace(
                sizes,
                cluster_dimension=dimension,
                swizzle=swizzle,
                max_concurrent_steps=stages,
                epilogue_stages=epilogue_stages,
            )
            for swizzle, stages, epilogue_stages in itertools.product(
                _SWIZZLES if scales is None else (128,), _STAGES, counts
            )
            if epilogue_stages <= sizes.epilogue_tiles_per_warpgroup
        )
        found += itertools.islice(filter(fits, staged), 1)
    return found


def other_tile_orders(tiling: Tiling, width: int, length: int) -> list[Tiling]:
    """The tiling with each other `grid_tile_width` that makes a difference.

    Args:
      tiling: tiling of a configuration.
      width: tiles on the side that the width of a stripe is counted along.
      length: tiles on the other side.
    """
    if length == 1:
        return []
    # A stripe that is wider than the grid is as wide as the grid.
    widths = {min(candidate, width): candidate for candidate in _GRID_TILE_WIDTHS}
    widths.pop(min(tiling.grid_tile_width, width), None)
    return [replace(tiling, grid_tile_width=candidate) for candidate in widths.values()]


def compute_microseconds(
    problem: MatmulProblem, tiling: Tiling, multiprocessors: int = 132
) -> float:
    """Predicted microseconds of a launch whose operands are all there: its slowest resource."""
    waves = _waves(problem, tiling, multiprocessors)
    rows, columns = tiling.warpgroup_tile
    multiplied = CONSUMERS * (rows + columns * rows // _WGMMA_ROWS)
    moved = min(tiling.tile_m, problem.m) + tiling.tile_n + multiplied
    moving = waves * problem.bytes_contracted * moved / _SHARED_BYTES_PER_MICROSECOND
    mma = _MMA_SHARE * predicted_microseconds(problem, tiling, multiprocessors)
    weight_bytes = problem.bytes_contracted * sum(problem.n)
    weight_reads = problem.batch if weight_bytes > _CACHE_BYTES else 1
    reading = _reading_microseconds(problem, tiling, multiprocessors)
    slowest = max(
        mma + moving + waves * _TILE_MICROSECONDS,
        reading,
        weight_reads * weight_bytes / _MEMORY_BYTES_PER_MICROSECOND,
    )
    # Among equally fast tilings, the one that reads least leaves most to the communication.
    return slowest + reading / 10


def compute_slowdown(scales: ScaledParts | None) -> float:
    """The time of a matmul whose operands have scales, relative to bytes of half precision."""
    return 1.0 if scales is None else _SLOWDOWN_OF_SCALES[scales]


def _reading_microseconds(problem: MatmulProblem, tiling: Tiling, multiprocessors: int) -> float:
    """Predicted microseconds to read all k-blocks of the operands from the L2 cache."""
    cluster_m, cluster_n = tiling.cluster
    # What is multicast is read once per cluster.
    rows = min(tiling.tile_m, problem.m) / cluster_n
    columns = tiling.tile_n / min(cluster_m, math.ceil(problem.m / tiling.tile_m))
    lines = _waves(problem, tiling, multiprocessors) * problem.bytes_contracted
    return lines * (rows + columns) / _READ_BYTES_PER_MICROSECOND[tiling.swizzle]


def _waves(problem: MatmulProblem, tiling: Tiling, multiprocessors: int) -> int:
    """Tiles of the multiprocessor that has most."""
    cluster_m, cluster_n = tiling.cluster
    grid_m = math.ceil(problem.m / (tiling.tile_m * cluster_m))
    grid_n = sum(math.ceil(n / (tiling.tile_n * cluster_n)) for n in problem.n)
    clusters = multiprocessors // (cluster_m * cluster_n)
    return math.ceil(problem.batch * grid_m * grid_n / clusters)


def ranked(
    configs: Iterable[C],
    predicted: Callable[[C], float],
    sizes: Callable[[C], Hashable],
    variations: Callable[[C], Iterable[C]],
) -> tuple[C, ...]:
    """Configurations and variations with equal predictions, the likeliest to be fastest first.

    Args:
      configs: configurations in any order.
      predicted: the predicted microseconds of each.
      sizes: the choice that matters most. The best configuration of each comes early, because the
        model errs most about it.
      variations: returns the variations of a configuration.
    """
    alike: dict[Hashable, list[tuple[float, C]]] = {}
    timed = [(predicted(config), config) for config in configs]
    for pair in sorted(timed, key=lambda pair: pair[0]):
        alike.setdefault(sizes(pair[1]), []).append(pair)
    scored = []
    for group in alike.values():
        varied = (v for _, config in group for v in variations(config))
        others = ((predicted(config), config) for config in varied)
        scored += [
            (seconds * _DOUBT**number, config)
            for number, (seconds, config) in enumerate(itertools.chain(group, others))
        ]
    return tuple(config for _, config in sorted(scored, key=lambda pair: pair[0]))


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel, to be configured.

    Attributes:
      op: name of the op.
      problem: a dataclass of numbers and tuples of numbers, among them `m`.
      multiprocessors: number of multiprocessors of each GPU.
    """

    op: Op
    problem: Any
    multiprocessors: int

    def to_json(self) -> dict[str, Any]:
        """The `problem` of its record in the table."""
        sizes = {name: size for name, size in asdict(self.problem).items() if size is not None}
        fields = {"op": self.op, "multiprocessors": self.multiprocessors, **sizes}
        return json.loads(json.dumps(fields))

    def record(self, config: Configuration, microseconds: float) -> data.Record:
        """Its record in the table: the fastest configuration, and what that took."""
        return data.Record(self.to_json(), {"fused": microseconds}, config.to_json())

    def predicted_microseconds(self, config: Any) -> float:
        """Predicted microseconds of the launch, and of XLA's kernels where rows are padded.

        They pad x before the launch, and slice the result after it.
        """
        padded = config.problem.m != self.problem.m
        if self.op == "matmul_all_reduce":
            # Owners' rows lie one after the other: only the last of all rows may be padded.
            padded = self.problem.m % ROW_MULTIPLE
        padding = 2e6 * HOPPER.kernel_seconds if padded else 0.0
        return config.predicted_microseconds(self.multiprocessors) + padding

    def choose(self, configs: Sequence[C]) -> C | None:
        """The configuration that was measured to be fastest, or the first, or None if none fits.

        A problem that is not in the table gets the likeliest configuration. The fastest one for
        fewer or for more rows would be slower: tests/ops/matmul/fused/test_measured_configs.py.

        Args:
          configs: all that fit, the likeliest first.
        """
        wanted = _measured_configs().get(_key(self.to_json()))
        measured = (config for config in configs if wanted and config.to_json() == wanted)
        return next(itertools.chain(measured, configs), None)


def _key(problem: Mapping[str, Any]) -> str:
    return json.dumps(dict(problem), sort_keys=True)


def shipped_configs() -> data.MeasuredData:
    """The table that ships with the library, measured on H200s."""
    table = data.shipped("NVIDIA H200", "fused_configs")
    assert table is not None
    return table


@functools.cache
def _measured_configs() -> dict[str, Mapping[str, Any]]:
    """The configurations measured to be fastest, as JSON has them, by problem."""
    records = shipped_configs().records
    return {_key(record.problem): record.config for record in records if record.config is not None}
