"""The persistent GEMM over groups of rows, each multiplied by a matrix of its own.

``outs[q][i] = sum over p of xs[p][i] @ ws[p][q][group of row i]``

Tiles of rows belong to one group each. Which tiles there are is known only when the program runs:
it reads them from arrays, and visits those that are used. So no time goes into groups without rows.
The matrices of all groups are the planes of w. See `matmul_kernel` for all else.

Rows of x follow each other, and come by TMA; or the load warpgroup copies them by index.

Of a tile that other groups have rows of, only its own rows are stored, from registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from collective_matmul.mosaic_gpu.grouped_matmul import row_loader
from collective_matmul.mosaic_gpu.grouped_matmul.group_tiles import GroupTiles
from collective_matmul.mosaic_gpu.grouped_matmul.row_copies import RowRange, store_rows
from collective_matmul.mosaic_gpu.grouped_matmul.row_loader import IndexedRows
from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import BLOCK_AXES
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE, Tiling
from collective_matmul.mosaic_gpu.kernel_types import (
    KBlockLoad,
    Operands,
    Ref,
    Scalar,
    Stages,
    TileCoord,
    TilePart,
)


class GroupedGemm(PersistentGemm):
    """The body of the kernel. A tile's batch is its group."""

    def __init__(
        self,
        xs: Sequence[Operand],
        ws: Sequence[Sequence[Operand]],
        outs: Sequence[Any],
        tiling: Tiling,
        *,
        indexed: bool,
        interpreted: bool,
    ):
        """Describes the kernel for operands and results of these shapes.

        Args:
          xs: [1, M, K_p], or [1, S, K_p] if rows come by index.
          ws: the matrices of all groups are planes, and `per_batch` is 1.
          outs: [1, M, N_q].
          tiling: how the matmul is tiled.
          indexed: whether rows of x come by index. Then no tile of x is multicast.
          interpreted: whether this runs in Pallas' interpreter.
        """
        super().__init__(xs, ws, outs, 1, 1, tiling)
        self.indexed, self.interpreted = indexed, interpreted
        if indexed:
            assert tiling.max_concurrent_steps >= row_loader.LEAST_STAGES
            # Rows of x are fewer than those of the result, maybe than those of a tile.
            self.x_rows = tiling.tile_m
            # Copying takes more registers than starting TMA does.
            self.load_registers, self.mma_registers = 56, 224
        # Set in `run`.
        self.tiles = GroupTiles(None, None, None, None)
        self.index: Ref = None

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are tiles, the index, the xs, the ws of each x, results."""
        count = len(self.tiles)
        self.tiles = GroupTiles(*refs[:count])
        if self.indexed:
            self.index, count = refs[count], count + 1
        super().run(indices, *refs[count:])

    @property
    def cluster_tiles(self) -> Scalar:
        """Number of clusters' tiles that groups have."""
        return self.tiles.used[0] * self.grid_n

    def tile_at(self, index: Scalar, tile_idx: Scalar) -> TileCoord:
        """Returns this block's tile of a cluster's tile.

        Some tiles of rows are visited with all columns before the next.
        """
        tiling, grid_n = self.tiling, self.grid_n
        if tiling.grid_minor_dim == "n":
            number, cluster_n = lax.div(index, grid_n), lax.rem(index, grid_n)
        else:
            stripe = tiling.grid_tile_width * grid_n
            first = lax.div(index, stripe) * tiling.grid_tile_width
            height = jnp.minimum(self.tiles.used[0] - first, tiling.grid_tile_width)
            within = lax.rem(index, stripe)
            number, cluster_n = first + lax.rem(within, height), lax.div(within, height)
        # The compiler has to see that it is a multiple of 8.
        row = self.tiles.rows[number] * ROW_MULTIPLE + lax.axis_index(BLOCK_AXES[0]) * tiling.tile_m
        return TileCoord(tile_idx, self.tiles.groups[number], row, cluster_n)

    def rows_of(self, tile: TileCoord, first: Scalar) -> RowRange:
        """Returns the rows of a tile's group, in a row of tiles that begins with `first`."""
        start, end = (self.tiles.bounds[2 * tile.batch + i] for i in range(2))
        return RowRange(first, start, end)

    def load_of_x(
        self, x_ref: Ref, x: Operand, indices: Ref, tile: TileCoord, x_stages: Ref
    ) -> KBlockLoad:
        """Returns what loads the k-blocks of x for a tile."""
        if not self.indexed:
            return super().load_of_x(x_ref, x, indices, tile, x_stages)
        rows = self.rows_of(tile, tile.row)
        return IndexedRows(x_ref.at[0], self.index, rows, x_stages, self.interpreted)

    def load_tiles(self, operands: Operands, stages: Stages) -> None:
        """Loads the k-blocks of all tiles, each as soon as its stage is empty."""
        if not self.indexed:
            super().load_tiles(operands, stages)
            return
        self.for_each_tile(lambda tile: self.load_tile(operands, stages, tile))
        steps = self.first_step(self.tiles_of_block())
        row_loader.finish(steps, stages.full, self.tiling.max_concurrent_steps)
        self.wait_until_empty(steps, stages)

    def out_plane(self, indices: Ref, batch: Scalar) -> Scalar:
        """Returns the plane of each result: the only one."""
        del indices, batch
        return 0

    def store_part(
        self,
        product: jax.Array,
        plane: Ref,
        tile: TileCoord,
        part: TilePart,
        column: Scalar,
        store_tiles: Ref,
    ) -> None:
        """Stores the rows of a part of a tile that are its group's."""
        # Of a tile, or of a cluster, parts may be beyond the last column.
        tiles = self.tiling.tile_n * self.tiling.cluster[1]
        rows = self.rows_of(tile, tile.row + part.row_offset)
        after = rows.first + self.tiling.warpgroup_tile[0]
        is_whole = (rows.start <= rows.first) & (after <= rows.end)

        @pl.when(is_whole)
        def _() -> None:
            self.store(product, plane, rows.first, column, store_tiles)

        @pl.when(jnp.logical_not(is_whole) & (rows.start < after) & (rows.first < rows.end))
        def _() -> None:
            store_rows(
                product.astype(plane.dtype),
                plane,
                rows,
                column,
                clips=plane.shape[-1] % tiles != 0,
                store_tile=store_tiles.at[0],
                interpreted=self.interpreted,
            )
