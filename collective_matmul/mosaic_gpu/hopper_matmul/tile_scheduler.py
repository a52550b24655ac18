"""The tiles of a launch: which block computes which of them, in which order and pipeline steps.

Blocks that multicast to each other form a cluster, and visit neighbouring tiles at the same time.
So grids count the tiles of clusters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.mosaic_gpu.kernel_types import Scalar, TileCoord

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

# The axes of a cluster. Blocks that differ along the first have the same columns of w in common,
# blocks that differ along the second the same rows of x.
BLOCK_AXES = ("block_m", "block_n")


class TileScheduler:
    """Deals out the tiles of the results to persistent blocks, cluster by cluster.

    All warpgroups of a block visit its tiles in the same order, without communicating.
    """

    def __init__(self, tiling: Tiling, batch: int, m: int, n: Sequence[int], steps: int):
        """Describes the tiles.

        Args:
          tiling: sizes of tiles and clusters.
          batch: planes of each result.
          m: rows of each plane.
          n: columns of each result.
          steps: pipeline steps of a tile.
        """
        self.tiling = tiling
        self.batch = batch
        self.steps = steps
        self.results = len(n)
        cluster_m, cluster_n = tiling.cluster
        self.grid_m = pl.cdiv(m, tiling.tile_m * cluster_m)
        widths = [pl.cdiv(columns, tiling.tile_n * cluster_n) for columns in n]
        # Where the tiles of each result end, along n.
        self.ends = list(itertools.accumulate(widths))
        self.grid_n = self.ends[-1]

    def for_each_tile(self, visit: Callable[[TileCoord], None]) -> None:
        """Calls ``visit(tile)`` for each of this block's tiles."""

        @plgpu.nd_loop((self.cluster_tiles,), collective_axes="cluster")
        def _(info: Any) -> None:
            (index,) = info.index
            visit(self.tile_at(index, info.local_index))

    def tile_at(self, index: Scalar, tile_idx: Scalar) -> TileCoord:
        """Returns this block's tile of a cluster's tile, by its index among those of all results.

        Args:
          index: of the cluster's tile.
          tile_idx: number of the tile in the sequence of this block's tiles.
        """
        tiling, per_batch = self.tiling, self.grid_m * self.grid_n
        cluster_m, cluster_n = plgpu.planar_snake(
            lax.rem(index, per_batch),
            (self.grid_m, self.grid_n),
            0 if tiling.grid_minor_dim == "m" else 1,
            tiling.grid_tile_width,
        )
        block_m = tiling.cluster[0] * cluster_m + lax.axis_index(BLOCK_AXES[0])
        batch = lax.div(index, per_batch)
        return TileCoord(tile_idx, batch, block_m * tiling.tile_m, cluster_n)

    @property
    def multicast_axes(self) -> tuple[str | None, str | None]:
        """The axis of a cluster whose blocks share k-blocks of w, and that for x, or None."""
        along_m, along_n = self.tiling.cluster
        return BLOCK_AXES[0] if along_m > 1 else None, BLOCK_AXES[1] if along_n > 1 else None

    @property
    def cluster_tiles(self) -> Scalar:
        """Number of clusters' tiles in all results."""
        return self.batch * self.grid_m * self.grid_n

    def tiles_of_block(self) -> Scalar:
        """Returns the number of tiles that this block visits."""
        clusters = lax.axis_size("cluster")
        return lax.div(self.cluster_tiles - lax.axis_index("cluster") + clusters - 1, clusters)

    def on_result(self, cluster_n: Scalar, act: Callable[[int, Scalar], None]) -> None:
        """Calls ``act(q, column)`` with the result that a tile is in, and the tile's first column.

        q is an int, so `act` is traced once for each result.
        """
        for q, (start, end) in enumerate(itertools.pairwise([0, *self.ends])):
            block_n = self.tiling.cluster[1] * (cluster_n - start) + lax.axis_index(BLOCK_AXES[1])
            here = functools.partial(act, q, block_n * self.tiling.tile_n)
            here() if self.results == 1 else pl.when((cluster_n >= start) & (cluster_n < end))(here)

    def first_column(self, tile: TileCoord) -> Scalar:
        """Returns the first column of the block's tile, counted through the tiles of results."""
        block_n = self.tiling.cluster[1] * tile.cluster_n + lax.axis_index(BLOCK_AXES[1])
        return block_n * self.tiling.tile_n

    def first_step(self, tile_idx: Scalar) -> Scalar:
        """Returns the number of pipeline steps before those of a tile."""
        return tile_idx * self.steps

    def steps_of(self, tile: TileCoord) -> Scalar:
        """Returns the number of pipeline steps of a tile."""
        del tile
        return self.steps

    def stage(self, tile_idx: Scalar, step: Scalar) -> Scalar:
        """Returns the stage of a step of a tile."""
        return lax.rem(self.first_step(tile_idx) + step, self.tiling.max_concurrent_steps)


def block_index_and_count() -> tuple[Scalar, int]:
    """Returns the index of this block, and the number of blocks of the kernel."""
    index, count = 0, 1
    for axis in ("cluster", *BLOCK_AXES):
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
        count *= lax.axis_size(axis)
    return index, count
