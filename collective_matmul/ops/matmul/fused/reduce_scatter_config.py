"""Configurations of the reduce-scatter matmul kernel: its tiling, and the owners of tiles."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import ScaledParts
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    ITEMSIZE,
    SHARED_MEMORY_BYTES,
    MatmulProblem,
    Tiling,
)
from collective_matmul.ops.matmul.fused.config_search import (
    ARRIVAL_MICROSECONDS,
    LINK_BYTES_PER_MICROSECOND,
    SENT_BYTES_PER_MICROSECOND,
    compute_microseconds,
    compute_slowdown,
)

#: Where sums are made. "scatter": each device sums the rows it owns, and keeps them. "two_shot": it
#: also sends them to all others. "one_shot": each device sums all rows. (The one_shot backend is
#: another kernel.)
ReductionKind = Literal["scatter", "two_shot", "one_shot"]

# Tiles that are sent and summed in epilogue tiles of 32 columns are slower by this factor.
_NARROW_EPILOGUE_TILES = 1.2
# What the blocks of a cluster wait for each other.
_CLUSTER_MICROSECONDS = 4.0
# Rate at which TMA of one multiprocessor reads partial products.
_PARTIAL_BYTES_PER_MICROSECOND = 1.2e5


@dataclass(frozen=True)
class ReduceScatterProblem:
    """The shapes of ``reduce_scatter(sum over p of xs[p] @ ws[p])``, or of its ``all_reduce``.

    Attributes:
      kind: the devices that compute the sums.
      devices: number of devices on the axis, D.
      planes: the product of the dimensions before the scattered one.
      m: rows of each plane that a device owns, a multiple of 8. For "one_shot", all rows.
      k: the local contracted size of each term.
      n: the columns.
      w_contracted_axis: the contracted axis of the weights, counted from 1.
      scales: the parts of 8-bit operands that have scales, or None in half precision.
    """

    kind: ReductionKind
    devices: int
    planes: int
    m: int
    k: tuple[int, ...]
    n: int
    w_contracted_axis: Literal[1, 2] = 1
    scales: ScaledParts | None = None

    @property
    def all_rows(self) -> int:
        """Rows of each plane of the product."""
        return self.m * (1 if self.kind == "one_shot" else self.devices)

    @property
    def matmul(self) -> MatmulProblem:
        """The matmul of all rows."""
        return MatmulProblem(
            self.planes,
            self.all_rows,
            self.k,
            (self.n,),
            w_contracted_axis=self.w_contracted_axis,
            itemsize=ITEMSIZE if self.scales is None else 1,
        )


@dataclass(frozen=True)
class ReduceScatterConfig:
    """A configuration of the kernel for a problem. Grids count tiles of clusters, not of blocks."""

    problem: ReduceScatterProblem
    tiling: Tiling

    @property
    def cluster_tile_m(self) -> int:
        """Rows that a cluster multiplies at once."""
        return self.tiling.tile_m * self.tiling.cluster[0]

    @property
    def grid_m(self) -> int:
        """Tiles along the rows of a plane."""
        return math.ceil(self.problem.all_rows / self.cluster_tile_m)

    @property
    def grid_n(self) -> int:
        """Tiles along the columns."""
        return math.ceil(self.problem.n / (self.tiling.tile_n * self.tiling.cluster[1]))

    @property
    def local_grid_m(self) -> int:
        """Tiles along the rows of a plane that have rows of one owner."""
        return math.ceil(self.problem.m / self.cluster_tile_m)

    @property
    def tiles_span_owners(self) -> bool:
        """Whether a tile has rows of several owners. Then it has all rows of each of them."""
        return self.problem.kind == "one_shot" or self.problem.m < self.cluster_tile_m

    @property
    def one_owner_rows(self) -> tuple[int, ...]:
        """Numbers of rows that a consumer's part of a tile may have of one owner, most first."""
        rows, (part_rows, _) = self.problem.m, self.tiling.warpgroup_tile
        counts = {0}
        for owner in range(1 if self.problem.kind == "one_shot" else self.problem.devices):
            # Of the part that the owner's rows begin in, of the parts after it, of the last.
            begun = min(rows, part_rows - owner * rows % part_rows)
            whole, last = divmod(rows - begun, part_rows)
            counts |= {begun, part_rows if whole else 0, last}
        return tuple(sorted(counts - {0}, reverse=True))

    @property
    def remote_tiles(self) -> int:
        """Tiles without a row that this device owns."""
        return self.problem.planes * (self.grid_m - self.local_grid_m) * self.grid_n

    @property
    def sources(self) -> int:
        """Partial products of each sum that come from memory. Another one may be in registers."""
        return self.problem.devices - (0 if self.problem.kind == "one_shot" else 1)

    @property
    def sent_copies(self) -> float:
        """Number of peers that get a partial product, averaged over those of a device."""
        devices = self.problem.devices
        return devices - 1 if self.problem.kind == "one_shot" else 1 - 1 / devices

    def cluster_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows of a cluster's tile."""
        return ITEMSIZE * rows * self.tiling.tile_n * self.tiling.cluster[1]

    @property
    def halves(self) -> int:
        """Parts, side by side, that the consumers divide a tile's columns into."""
        return 2 if self.tiling.wg_dimension == "n" else 1

    @property
    def partial_steps(self) -> int:
        """Pipeline steps that bring the partial products of a tile, each an epilogue tile."""
        return self.tiling.epilogue_tiles_per_warpgroup * self.sources * self.halves

    @property
    def row_tiles(self) -> int:
        """Blocks' tiles, along the rows, that have rows of one owner."""
        return math.ceil(self.problem.m / self.tiling.tile_m)

    @property
    def column_tiles(self) -> int:
        """Blocks' tiles along the columns."""
        return self.grid_n * self.tiling.cluster[1]

    @property
    def local_tiles(self) -> int:
        """Blocks' tiles that have rows of one owner."""
        return self.problem.planes * self.row_tiles * self.column_tiles

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values, without its problem."""
        return {
            "tiling": asdict(self.tiling),
            "kind": self.problem.kind,
            "m": self.problem.m,
        }

    def fits(self) -> bool:
        """Whether the kernel can run this configuration."""
        warpgroup_rows, _ = self.tiling.warpgroup_tile
        rows, cluster_rows = self.problem.m, self.cluster_tile_m
        # A block's tile that has all rows of all owners spans them however they are divided.
        if self.problem.kind != "one_shot" and self.problem.all_rows > self.tiling.tile_m:
            # Several owners visit a tile that spans them in the same order only if the tile has all
            # their rows.
            if rows % cluster_rows and cluster_rows % rows:
                return False
            # The rows of one owner fill whole warpgroup tiles, or are in one.
            if rows % warpgroup_rows and warpgroup_rows % rows:
                return False
        # A tile is sent while the next one is multiplied.
        if self.tiling.epilogue_stages < self.tiling.epilogue_tiles_per_warpgroup:
            return False
        # An epilogue tile is swizzled like the k-blocks in whose memory its owner receives it.
        if self.tiling.epilogue_tile_n * ITEMSIZE % self.tiling.swizzle:
            return False
        # It also fits into a k-block.
        matmul = self.problem.matmul
        if matmul.itemsize * self.tiling.tile_k % (ITEMSIZE * self.tiling.epilogue_tile_n):
            return False
        return (
            matmul.can_swizzle(self.tiling)
            and self.tiling.shared_memory_bytes_of(matmul.itemsize) <= SHARED_MEMORY_BYTES
        )

    def predicted_microseconds(self, multiprocessors: int = 132) -> float:
        """Predicted microseconds of a launch, with what it waits for peers that began with it."""
        problem, tiling = self.problem, self.tiling
        clusters = multiprocessors // math.prod(tiling.cluster)
        waves = math.ceil(problem.planes * self.grid_m * self.grid_n / clusters)
        compute = compute_microseconds(problem.matmul, tiling, multiprocessors)
        compute *= compute_slowdown(problem.scales)
        if tiling.epilogue_tile_n < 64:
            compute *= _NARROW_EPILOGUE_TILES
        if tiling.cluster_dimension is not None:
            compute += _CLUSTER_MICROSECONDS
        product_bytes = ITEMSIZE * problem.planes * problem.all_rows * problem.n
        trips = 2 if problem.kind == "two_shot" else 1
        compute += trips * self.sent_copies * product_bytes / SENT_BYTES_PER_MICROSECOND
        local_waves = waves * self.local_grid_m / self.grid_m
        partial_bytes = ITEMSIZE * min(tiling.tile_m, problem.m) * tiling.tile_n * self.sources
        adding = local_waves * partial_bytes / _PARTIAL_BYTES_PER_MICROSECOND
        arrived = _arrival_microseconds(self, compute / waves, clusters)
        returning = _return_microseconds(self, clusters) if trips == 2 else 0
        return max(compute, arrived) + adding + returning


def _arrival_microseconds(config: ReduceScatterConfig, wave: float, clusters: int) -> float:
    """When the last partial product of peers arrives, if a wave of tiles takes them `wave`.

    A tile is sent while the next one is multiplied. The last wave with something to send sends all
    of it at once.
    """
    tiles = config.remote_tiles
    if config.tiles_span_owners:
        tiles = config.problem.planes * config.grid_m * config.grid_n
    copies = config.sent_copies if config.tiles_span_owners else 1
    rows = min(config.cluster_tile_m, config.problem.all_rows)
    sending = copies * config.cluster_bytes(rows) / LINK_BYTES_PER_MICROSECOND
    waves = math.ceil(tiles / clusters)
    last = tiles - (waves - 1) * clusters
    return ARRIVAL_MICROSECONDS + max(waves * wave + last * sending, wave + tiles * sending)


def _return_microseconds(config: ReduceScatterConfig, clusters: int) -> float:
    """The time in which the sums of the last wave reach all peers."""
    problem = config.problem
    last = 1 + (problem.planes * config.local_grid_m * config.grid_n - 1) % clusters
    sums_bytes = last * config.cluster_bytes(min(problem.m, config.cluster_tile_m))
    return ARRIVAL_MICROSECONDS + (problem.devices - 1) * sums_bytes / LINK_BYTES_PER_MICROSECOND
