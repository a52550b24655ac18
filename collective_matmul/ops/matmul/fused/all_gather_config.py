"""Configurations of the all-gather matmul kernel: its tiling, and the pieces of a shard it sends.

A *box* is the region that one bulk copy moves, as in CUDA's tensor maps: some rows of a slab.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK, ScaledParts
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ITEMSIZE, MatmulProblem, Tiling
from collective_matmul.operands.scaled.packed_rows import scale_bytes, scales_of_row
from collective_matmul.ops.matmul.fused.config_search import (
    ARRIVAL_MICROSECONDS,
    LINK_BYTES_PER_MICROSECOND,
    SENT_BYTES_PER_MICROSECOND,
    compute_microseconds,
    compute_slowdown,
)

#: Bytes of shared memory in each block for the boxes in flight, at least two.
BOXES_BYTES = 16_384
#: Bytes of the largest boxes, by choice. A block takes about a microsecond to send any box.
BOX_BYTES = (8_192, 4_096, 2_048)

#: Bytes of the lines that packed rows are sent in.
LINE_BYTES = 128

# What a producer takes to check whether a slab has arrived.
_POLL_MICROSECONDS = 0.2
# Some block sends later than the others. Its part of all rows may be late by this share of the
# whole time, or of one slab's.
_LATE = 0.02
# Arrival rate while several peers send at once: above that of XLA's all-gathers, below one peer's.
_CROWDED_LINK_BYTES_PER_MICROSECOND = 3.0e5
# Tiles that span shards need rows of every peer: each peer delays the last arrival further.
_SPANNING_MICROSECONDS = 4.0


@dataclass(frozen=True)
class AllGatherProblem:
    """The shapes of ``all_gather(x) @ w``.

    Attributes:
      devices: number of devices on the axis, D.
      planes: number of planes of a shard: the product of the dimensions before the gathered one.
      m: rows of a shard in each plane.
      k: the contracted size.
      n: the columns of each result.
      w_contracted_axis: the contracted axis of the weights, counted from 1.
      scales: the parts of 8-bit operands that have scales, or None in half precision.
    """

    devices: int
    planes: int
    m: int
    k: int
    n: tuple[int, ...]
    w_contracted_axis: Literal[1, 2] = 1
    scales: ScaledParts | None = None

    @property
    def itemsize(self) -> Literal[1, 2]:
        """Bytes of a number of x."""
        return ITEMSIZE if self.scales is None else 1

    @property
    def columns(self) -> int:
        """Numbers in a row of x in memory: of a message, with the bytes of its scales."""
        if self.scales is None:
            return self.k
        block = BLOCK if self.scales == "blocks" else None
        return self.k + scale_bytes(scales_of_row(self.k, block))

    @property
    def shard_bytes(self) -> int:
        """Bytes of a device's shard of x."""
        return self.itemsize * self.planes * self.m * self.columns

    def matmul(self, tiles_span_shards: bool) -> MatmulProblem:
        """The matmul of all shards: each in planes of its own, or concatenated."""
        batch, m = self.planes * self.devices, self.m
        if tiles_span_shards:
            batch, m = self.planes, self.m * self.devices
        axis = self.w_contracted_axis
        return MatmulProblem(
            batch, m, (self.k,), self.n, w_contracted_axis=axis, itemsize=self.itemsize
        )


@dataclass(frozen=True)
class AllGatherConfig:
    """A configuration of the kernel for a problem. Grids count tiles of clusters, not of blocks.

    Attributes:
      problem: the shapes.
      tiling: tiling of the matmul.
      tiles_span_shards: whether a tile may have rows of several shards.
      rows_per_group: rows of a shard, in each plane, that are multiplied at about the same time.
        The last group of a plane may have fewer.
      slabs: equal ranges of K. The slabs of a group of rows are sent one after the other, and each
        is multiplied once it has arrived. Messages are one slab: their scales are at the end.
      box: rows and columns of a slab that are sent at once. Boxes fill the slab of every group. Of
        messages, lines and their bytes: see `lines_per_row`.
      boxes_per_message: consecutive boxes whose arrival is counted as one.
      peers_per_pass: how many peers get the shard in each pass over it, those that need it first in
        the first pass. The peers of one pass get every message at the same time.
    """

    problem: AllGatherProblem
    tiling: Tiling
    tiles_span_shards: bool
    rows_per_group: int
    slabs: int
    box: tuple[int, int]
    boxes_per_message: int
    peers_per_pass: tuple[int, ...]

    @property
    def lines_per_row(self) -> int:
        """The rows as which a row of x is sent: a message as lines of `LINE_BYTES`.

        A row of a message may have a number of bytes that no large box divides. Of the lines of
        several rows, which are contiguous, boxes may have any number.
        """
        return 1 if self.problem.scales is None else self.problem.columns // LINE_BYTES

    @property
    def sent_columns(self) -> int:
        """Columns of the rows as which x is sent."""
        return self.problem.columns // self.lines_per_row

    @property
    def slab_columns(self) -> int:
        """Columns of x in a slab."""
        return self.sent_columns // self.slabs

    @property
    def pieces(self) -> int:
        """Contiguous pieces of x that a box consists of."""
        rows, columns = self.box
        return 1 if columns == self.sent_columns else rows

    @property
    def buffers(self) -> int:
        """Boxes of each block that are in flight from the shard to the peers."""
        rows, columns = self.box
        return BOXES_BYTES // max(self.problem.itemsize * rows * columns, min(BOX_BYTES))

    @property
    def boxes_across(self) -> int:
        """Boxes, side by side, in a slab."""
        return self.slab_columns // self.box[1]

    @property
    def groups(self) -> int:
        """Groups of rows in each plane of a shard."""
        return math.ceil(self.problem.m / self.rows_per_group)

    def boxes_per_slab(self, rows: int) -> int:
        """Boxes that one slab of `rows` rows is sent in."""
        return rows * self.lines_per_row // self.box[0] * self.boxes_across

    @property
    def boxes_per_plane(self) -> int:
        """Boxes that each plane of a shard is sent in."""
        return self.slabs * self.boxes_per_slab(self.problem.m)

    @property
    def messages(self) -> int:
        """Messages that a shard is sent in."""
        return self.problem.planes * self.boxes_per_plane // self.boxes_per_message

    @functools.cached_property
    def matmul(self) -> MatmulProblem:
        """The matmul of all shards."""
        return self.problem.matmul(self.tiles_span_shards)

    @functools.cached_property
    def grid_m(self) -> int:
        """Tiles along the rows of a plane."""
        return math.ceil(self.matmul.m / (self.tiling.tile_m * self.tiling.cluster[0]))

    @functools.cached_property
    def grid_n(self) -> int:
        """Tiles along the columns of all results."""
        columns = self.tiling.tile_n * self.tiling.cluster[1]
        return sum(math.ceil(n / columns) for n in self.problem.n)

    @functools.cached_property
    def tile_count(self) -> int:
        """Tiles of all results."""
        return self.matmul.batch * self.grid_m * self.grid_n

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values, without its problem."""
        return {
            "tiling": asdict(self.tiling),
            "tiles_span_shards": self.tiles_span_shards,
            "slabs": self.slabs,
            "box": list(self.box),
            "boxes_per_message": self.boxes_per_message,
            "peers_per_pass": list(self.peers_per_pass),
        }

    def predicted_microseconds(self, multiprocessors: int = 132) -> float:
        """Predicted microseconds of a launch, with what it waits for peers."""
        matmul, problem = self.matmul, self.problem
        compute = compute_microseconds(matmul, self.tiling, multiprocessors)
        compute *= compute_slowdown(problem.scales)
        compute += matmul.batch * self.slabs * _POLL_MICROSECONDS
        compute *= 1 + _LATE / self.slabs
        receivers = problem.devices - (0 if self.tiles_span_shards else 1)
        compute += problem.shard_bytes * receivers / SENT_BYTES_PER_MICROSECOND
        clusters = min(self.tile_count, multiprocessors // math.prod(self.tiling.cluster))
        # The clusters that come to the shards of peers first, and last, wait longest.
        return max(
            _cluster_microseconds(self, compute, cluster, clusters)
            for cluster in {0, clusters // 2, (self.tile_count - 1) % clusters, clusters - 1}
        )


def _cluster_microseconds(
    config: AllGatherConfig, compute: float, cluster: int, clusters: int
) -> float:
    """The time at which a cluster ends, if all clusters take `compute` and wait for slabs."""
    problem, spans = config.problem, config.tiles_span_shards
    peers = problem.devices - 1
    crowded = max(config.peers_per_pass) > 1
    rate = _CROWDED_LINK_BYTES_PER_MICROSECOND if crowded else LINK_BYTES_PER_MICROSECOND
    shard = problem.shard_bytes / rate
    # For each chunk, from the first peer's on: peers served in earlier passes, and in its own.
    passes = [
        (sum(config.peers_per_pass[:number]), count)
        for number, count in enumerate(config.peers_per_pass)
        for _ in range(count)
    ]
    arrival = ARRIVAL_MICROSECONDS + (peers * _SPANNING_MICROSECONDS if spans else 0)
    tiles = config.tile_count
    per_chunk = tiles // (problem.planes if spans else problem.devices)
    wave, now = compute / math.ceil(tiles / clusters), 0.0
    groups = problem.planes * config.groups
    # Within this share of a chunk's tiles all its rows are multiplied for the first time.
    stripe = min(1.0, config.tiling.grid_tile_width / config.grid_n)
    all_arrived = arrival + peers * shard
    for tile in range(cluster, tiles, clusters):
        chunk, within = divmod(tile, per_chunk)
        if now >= all_arrived:
            return now + len(range(tile, tiles, clusters)) * wave
        if chunk == 0 and not spans:
            now += wave
            continue
        if spans:
            before, sent = 0.0, peers * shard
        else:
            group = min(groups - 1, int(groups * within / (per_chunk * stripe)))
            earlier, served = passes[chunk - 1]
            before = (earlier + served * group / groups) * shard
            sent = served * shard / groups
        first, whole = (arrival + before + sent * share for share in (1 / config.slabs, 1))
        now = max(max(now, first) + wave, whole + wave / config.slabs)
    return now
