"""Candidate configurations of the all-gather matmul kernel, and the best of them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    ROW_MULTIPLE,
    SHARED_MEMORY_BYTES,
    MatmulProblem,
    Tiling,
)
from collective_matmul.ops.matmul.fused.all_gather_config import (
    BOX_BYTES,
    BOXES_BYTES,
    AllGatherConfig,
    AllGatherProblem,
)
from collective_matmul.ops.matmul.fused.config_search import (
    KernelCall,
    feasible_tilings,
    other_tile_orders,
    ranked,
)

# If rows are few, a block should send at least this many boxes, those of the first slab first.
_BOXES_PER_BLOCK = 4
# The columns of a box are a multiple of this: Mosaic copies multiples of 128 bytes.
_COLUMN_MULTIPLE = 64
# Numbers of slabs that K may be sent in, and the columns of the narrowest: narrower ones would be
# sent in small pieces.
_SLABS = (1, 2, 4, 8, 16)
_SLAB_COLUMNS = 512
# Bytes of shared memory that senders leave to the tiles.
_TILE_BYTES = SHARED_MEMORY_BYTES - BOXES_BYTES
# With this many messages per block all blocks send until the end, and rows arrive in order.
_MESSAGES_PER_BLOCK = 4


def choose_all_gather_config(
    problem: AllGatherProblem, multiprocessors: int = 132
) -> AllGatherConfig | None:
    """The configuration measured or predicted to be fastest; None if the kernel cannot do it.

    `problem` may have any number of rows. The rows of the configuration's problem are padded if the
    kernel needs that.
    """
    call = KernelCall("all_gather_matmul", problem, multiprocessors)
    return call.choose(candidate_all_gather_configs(problem, multiprocessors))


@functools.cache
def candidate_all_gather_configs(
    problem: AllGatherProblem, multiprocessors: int = 132
) -> tuple[AllGatherConfig, ...]:
    """All configurations that the kernel can run, the likeliest to be fastest first."""
    # Padding takes one pass over the shard, and one to slice the results.
    padded = replace(problem, m=-(-problem.m // ROW_MULTIPLE) * ROW_MULTIPLE)
    configs = _configs(problem, multiprocessors) or _configs(padded, multiprocessors)

    def variations(config: AllGatherConfig) -> list[AllGatherConfig]:
        boxes = [_sent_in(config, size, multiprocessors) for size in BOX_BYTES]
        parts = config.tiles_span_shards, config.peers_per_pass, multiprocessors
        slabs = _slabbed(config.problem, config.tiling, *parts)
        orders = (
            _config(config.problem, tiling, config.slabs, *parts)
            for tiling in other_tile_orders(config.tiling, config.grid_n, config.grid_m)
        )
        return [other for other in dict.fromkeys((*boxes, *slabs, *orders)) if other != config]

    predicted = functools.partial(
        AllGatherConfig.predicted_microseconds, multiprocessors=multiprocessors
    )
    return ranked(configs, predicted, _sizes, variations)


def _sizes(config: AllGatherConfig) -> tuple[Any, ...]:
    tiling = config.tiling
    return tiling.tile_m, tiling.tile_n, config.tiles_span_shards, config.peers_per_pass


def _configs(problem: AllGatherProblem, multiprocessors: int) -> list[AllGatherConfig]:
    if problem.k % _COLUMN_MULTIPLE:
        return []

    def fits(matmul: MatmulProblem, tiling: Tiling) -> bool:
        shared_memory_bytes = tiling.shared_memory_bytes_of(problem.itemsize)
        return shared_memory_bytes <= _TILE_BYTES and _can_swizzle(matmul, tiling)

    def in_order_of_arrival(spans: bool) -> list[Tiling]:
        """Tilings that multiply all tiles of some rows before those of the next rows."""
        matmul = problem.matmul(spans)
        found = feasible_tilings(functools.partial(fits, matmul), problem.scales)
        return [replace(tiling, grid_minor_dim="n") for tiling in found]

    def best_slabbed(tiling: Tiling, spans: bool, passes: tuple[int, ...]) -> AllGatherConfig:
        slabbed = _slabbed(problem, tiling, spans, passes, multiprocessors)
        return min(slabbed, key=lambda config: config.predicted_microseconds(multiprocessors))

    return [
        best_slabbed(tiling, spans, passes)
        for spans in (False, True)
        for tiling in in_order_of_arrival(spans)
        for passes in _peers_per_pass(problem, tiling, spans, multiprocessors)
    ]


def _slabbed(
    problem: AllGatherProblem,
    tiling: Tiling,
    spans: bool,
    peers_per_pass: tuple[int, ...],
    multiprocessors: int,
) -> list[AllGatherConfig]:
    """Configurations that differ in their number of slabs."""
    counts = (
        slabs
        for slabs in (_SLABS if problem.scales is None else (1,))
        if problem.k % (slabs * _COLUMN_MULTIPLE) == 0
        and (slabs == 1 or problem.k // slabs >= _SLAB_COLUMNS)
    )
    return [
        _config(problem, tiling, slabs, spans, peers_per_pass, multiprocessors) for slabs in counts
    ]


def _peers_per_pass(
    problem: AllGatherProblem, tiling: Tiling, spans: bool, multiprocessors: int
) -> list[tuple[int, ...]]:
    """A pass for each peer, and a pass for the peers whose tiles are multiplied in one wave."""
    peers = problem.devices - 1
    if spans:
        return [(peers,)]
    config = AllGatherConfig(problem, tiling, spans, problem.m, 1, (1, 1), 1, ())
    per_chunk = config.tile_count / problem.devices
    clusters = multiprocessors // math.prod(tiling.cluster)
    waves = Counter(int((chunk + 0.5) * per_chunk / clusters) for chunk in range(1, peers + 1))
    return list(dict.fromkeys([(1,) * peers, tuple(waves.values())]))


def _config(
    problem: AllGatherProblem,
    tiling: Tiling,
    slabs: int,
    spans: bool,
    peers_per_pass: tuple[int, ...],
    multiprocessors: int,
) -> AllGatherConfig:
    config = AllGatherConfig(problem, tiling, spans, problem.m, slabs, (1, 1), 1, peers_per_pass)
    if not spans:
        clusters = multiprocessors // math.prod(tiling.cluster)
        clusters_m = max(1, clusters // min(config.grid_n, tiling.grid_tile_width))
        rows = min(problem.m, clusters_m * tiling.tile_m * tiling.cluster[0])
        config = replace(config, rows_per_group=rows)
    return _sent_in(config, _usual_box_bytes(config, multiprocessors), multiprocessors)


def _usual_box_bytes(config: AllGatherConfig, multiprocessors: int) -> int:
    """Bytes of the largest boxes, unless others were measured to be faster."""
    # Most shards are a power of two in size, and are shared evenly by a power of two of blocks.
    senders = 1 << multiprocessors.bit_length() - 1
    share = config.problem.shard_bytes // (min(config.slabs, _BOXES_PER_BLOCK) * senders)
    return next((size for size in BOX_BYTES if size <= share), min(BOX_BYTES))


def _sent_in(config: AllGatherConfig, box_bytes: int, multiprocessors: int) -> AllGatherConfig:
    """Cuts messages into boxes of at most `box_bytes`, as few as keep all blocks sending."""
    boxed = replace(config, box=_box(config, box_bytes), boxes_per_message=1)
    # No message has parts of two slabs.
    boxes = _rows_of_all_groups(boxed) // boxed.box[0] * boxed.boxes_across
    wanted = max(1, boxed.messages // (_MESSAGES_PER_BLOCK * multiprocessors))
    return replace(boxed, boxes_per_message=_largest_divisor(boxes, wanted))


def _can_swizzle(matmul: MatmulProblem, tiling: Tiling) -> bool:
    """Whether all k-blocks can be swizzled, and no warpgroup's tile ends within a swizzle."""
    columns = tiling.warpgroup_tile[1]
    whole = tiling.wg_dimension == "m" or columns % (tiling.swizzle // matmul.itemsize) == 0
    return whole and matmul.can_swizzle(tiling)


def _box(config: AllGatherConfig, most_bytes: int) -> tuple[int, int]:
    """The largest box that divides slabs evenly."""
    columns, most = config.slab_columns, most_bytes // config.problem.itemsize
    if columns > most:
        parts = columns // _COLUMN_MULTIPLE
        return 1, _COLUMN_MULTIPLE * _largest_divisor(parts, most // _COLUMN_MULTIPLE)
    return _largest_divisor(_rows_of_all_groups(config), most // columns), columns


def _rows_of_all_groups(config: AllGatherConfig) -> int:
    """The greatest common divisor of the groups' sent rows, including a smaller last group."""
    return config.lines_per_row * math.gcd(config.problem.m, config.rows_per_group)


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
