"""The walk over the tiles of a product that devices sum up, and who owns which of them.

Each device walks over all tiles: first those without an own row, beginning with the rows behind its
own, then those that have some. `scatter_kernel` says what it does at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.backends.fused.reduce_scatter_config import ReduceScatterConfig
from collective_matmul.mosaic_gpu.matmul_kernel import BLOCK_AXES, Work
from collective_matmul.mosaic_gpu.operands import Operand

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu


class Strips(NamedTuple):
    """Shared memory seen in two ways: swizzled, and as it lies there, in rows of the same size."""

    swizzled: Any
    image: Any

    def select(self, number: Any) -> Strips:
        """Of the first dimension."""
        return Strips(self.swizzled.at[number], self.image.at[number])


class OwnersWalk(Work):
    """A matmul whose tiles have owners. Batches are the planes of x."""

    def __init__(self, config: ReduceScatterConfig, xs, ws):
        problem = config.problem
        product = jax.ShapeDtypeStruct((problem.planes, problem.all_rows, problem.n), xs[0].dtype)
        x_operands = [Operand(x, 2, per_batch=1) for x in xs]
        w_operands = [[Operand(w, problem.w_contracted_axis)] for w in ws]
        super().__init__(x_operands, w_operands, [product], problem.planes, 1, config.tiling)
        self.config = config
        self.problem = problem
        # Found when the kernel runs.
        self.rendezvous: Any = None

    def walk(self, visit) -> None:
        """Calls ``visit(turn, batch, row, across)`` for each of this block's tiles."""

        @plgpu.nd_loop((self.cluster_tiles,), collective_axes="cluster")
        def _(info):
            visit(info.local_index, *self.locate(info.local_index))

    def locate(self, turn) -> tuple[Any, Any, Any]:
        """The batch, the row and the place across of a tile; those with own rows come last."""
        config = self.config
        index = turn * lax.axis_size("cluster") + lax.axis_index("cluster")
        own = index >= config.remote_tiles
        height = jnp.where(own, config.local_grid_m, config.grid_m - config.local_grid_m)
        index = jnp.where(own, index - config.remote_tiles, index)
        batch, index = (
            lax.div(index, height * config.grid_n),
            lax.rem(index, height * config.grid_n),
        )
        down, across = plgpu.planar_snake(
            index, (height, config.grid_n), 0, config.tiling.grid_tile_width
        )
        first = lax.div(self.first_row(self.rendezvous.axis_index), config.cluster_tile_m)
        down = lax.rem(first + jnp.where(own, 0, config.local_grid_m) + down, config.grid_m)
        down = config.tiling.cluster[0] * down + lax.axis_index(BLOCK_AXES[0])
        return batch, down * config.tiling.tile_m, across

    def foreign_turns(self) -> Any:
        """How many of this block's tiles have no own row."""
        clusters = lax.axis_size("cluster")
        return lax.div(
            self.config.remote_tiles - lax.axis_index("cluster") + clusters - 1, clusters
        )

    def blocks_with_tiles(self) -> Any:
        """How many blocks of a device visit any tile."""
        clusters = min(self.cluster_tiles, lax.axis_size("cluster"))
        return clusters * math.prod(self.tiling.cluster)

    def first_step(self, turn) -> Any:
        """How many steps come before a tile's: those with own rows take more."""
        own = jnp.maximum(turn - self.foreign_turns(), 0)
        return turn * self.steps + own * self.config.partial_steps

    def first_row(self, owner) -> Any:
        """Of those that a device owns."""
        return 0 if self.problem.kind == "one_shot" else owner * self.problem.m

    def owns(self, owner, row) -> Any:
        """Whether a device owns rows of the block's tile at `row`."""
        first = self.first_row(owner)
        return (row < first + self.problem.m) & (row + self.tiling.tile_m > first)

    def number(self, owner, batch, row, across) -> Any:
        """Which of an owner's tiles this is."""
        down = lax.div(jnp.maximum(row - self.first_row(owner), 0), self.tiling.tile_m)
        across = self.tiling.cluster[1] * across + lax.axis_index(BLOCK_AXES[1])
        return (batch * self.config.row_tiles + down) * self.config.column_tiles + across

    def column(self, across) -> Any:
        """Where a tile begins."""
        across = self.tiling.cluster[1] * across + lax.axis_index(BLOCK_AXES[1])
        return across * self.tiling.tile_n

    # What owners have of a consumer's part of a tile, which begins at a row and column.

    @property
    def in_boxes(self) -> bool:
        """Whether a part of a tile has rows of several owners, each in a box of its own."""
        return self.problem.kind != "one_shot" and self.problem.m < self.tiling.warpgroup_tile[0]

    def blocks(self, strip, plane, owner, row, column) -> Iterator[tuple[Any, Any, Any]]:
        """What an owner may get of a strip's image, where in its plane, and whether it gets that.

        A copy's size is fixed when it is compiled. So there is one for each number of rows that an
        owner may get: all of the part's, or what whole parts leave of its own.
        """
        rows, part = self.problem.m, self.tiling.warpgroup_tile[0]
        first = self.first_row(owner)
        above, below = jnp.maximum(first - row, 0), jnp.maximum(row - first, 0)
        count = jnp.minimum(rows - below, part - above)
        place = plane.at[lax.div(column, self.tiling.epilogue_tile_n)]
        for height in (part if rows >= part else 0, rows % part):
            if height:
                block, there = strip.image.at[pl.ds(above, height)], place.at[pl.ds(below, height)]
                yield block, there, (count == height) & (column < self.problem.n)

    def box(self, strip, plane, row, column) -> tuple[Any, Any, Any]:
        """What of a strip this device owns, where in its plane of the result that goes, or not."""
        first, rows = self.first_row(self.rendezvous.axis_index), self.tiling.warpgroup_tile[0]
        columns = pl.ds(column, self.tiling.epilogue_tile_n)
        # Left to the copy engine, columns beyond the end would be stored if there is one strip.
        within = column < self.problem.n
        if self.in_boxes:
            within &= (first >= row) & (first < row + rows)
            box = strip.at[pl.ds(jnp.where(within, first - row, 0), self.problem.m)]
            return box, plane.at[pl.ds(0, self.problem.m), columns], within
        within &= (row >= first) & (row < first + self.problem.m)
        start = jnp.where(within, row - first, 0)
        return strip, plane.at[pl.ds(start, rows), columns], within
