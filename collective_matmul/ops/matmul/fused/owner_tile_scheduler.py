"""The tiles of a product that devices sum: in which order to compute them, and who owns which rows.

Every device computes all tiles of its own product. Each row of the sum has an *owner*, the device
that sums it; in the one-shot all-reduce every device owns all rows. For one device, a tile is
*local* if the device owns some of its rows, and *remote* otherwise.

Remote tiles come first, from the rows after the device's own on, so that their owners get them
early and at any time every device sends to a different one. Local tiles come last, when the partial
products of the peers have probably arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import BLOCK_AXES
from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar, TileCoord
from collective_matmul.ops.matmul.fused.reduce_scatter_config import ReduceScatterConfig

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


class EpilogueTiles(NamedTuple):
    """Shared memory of epilogue tiles, seen in two ways.

    Attributes:
      swizzled: what a warpgroup reads and writes, in the order of rows and columns.
      raw: the same bytes as they are stored, still swizzled. Epilogue tiles travel between devices
        like this, as contiguous memory.
    """

    swizzled: Ref
    raw: Ref

    def select(self, index: Scalar) -> EpilogueTiles:
        """Returns the tiles at an index of the first dimension."""
        return EpilogueTiles(self.swizzled.at[index], self.raw.at[index])


class OwnerTileScheduler(PersistentGemm):
    """A GEMM whose tiles have owners. Its batches are the planes of x."""

    def __init__(
        self, config: ReduceScatterConfig, xs: Sequence[Any], ws: Sequence[Any], dtype: Any
    ):
        problem = config.problem
        product = jax.ShapeDtypeStruct((problem.planes, problem.all_rows, problem.n), dtype)
        x_operands = [Operand(x, 2, per_batch=1) for x in xs]
        w_operands = [[Operand(w, problem.w_contracted_axis)] for w in ws]
        super().__init__(x_operands, w_operands, [product], problem.planes, 1, config.tiling)
        self.config = config
        self.problem = problem
        # Offsets of the devices that get products, or sums, of this one.
        self.receivers = range(0 if problem.kind == "one_shot" else 1, problem.devices)
        # Set when the kernel runs.
        self.rendezvous: Any = None

    # The order of tiles.

    def for_each_tile(self, visit: Callable[[TileCoord], None]) -> None:
        """Calls ``visit(tile)`` for each of this block's tiles, remote ones first."""

        @plgpu.nd_loop((self.cluster_tiles,), collective_axes="cluster")
        def _(info: Any) -> None:
            visit(self.tile_at(info.local_index))

    def tile_at(self, tile_idx: Scalar) -> TileCoord:
        """Returns this block's tile with this number."""
        config = self.config
        index = tile_idx * lax.axis_size("cluster") + lax.axis_index("cluster")
        is_local = index >= config.remote_tiles
        # Local and remote tiles have a grid each, of this height.
        height = jnp.where(is_local, config.local_grid_m, config.grid_m - config.local_grid_m)
        index = jnp.where(is_local, index - config.remote_tiles, index)
        batch, index = (
            lax.div(index, height * config.grid_n),
            lax.rem(index, height * config.grid_n),
        )
        cluster_m, cluster_n = plgpu.planar_snake(
            index, (height, config.grid_n), 0, config.tiling.grid_tile_width
        )
        # Rows count from the device's own on; remote rows come after them, and wrap around.
        first = lax.div(self.first_row(self.rendezvous.axis_index), config.cluster_tile_m)
        offset = jnp.where(is_local, 0, config.local_grid_m)
        cluster_m = lax.rem(first + offset + cluster_m, config.grid_m)
        block_m = config.tiling.cluster[0] * cluster_m + lax.axis_index(BLOCK_AXES[0])
        return TileCoord(tile_idx, batch, block_m * config.tiling.tile_m, cluster_n)

    def remote_tiles_of_block(self) -> Scalar:
        """Returns the number of remote tiles that this block visits, before the local ones."""
        clusters = lax.axis_size("cluster")
        return lax.div(
            self.config.remote_tiles - lax.axis_index("cluster") + clusters - 1, clusters
        )

    def blocks_with_tiles(self) -> Scalar:
        """Returns the number of blocks of a device that visit any tile."""
        clusters = min(self.cluster_tiles, lax.axis_size("cluster"))
        return clusters * math.prod(self.tiling.cluster)

    def first_step(self, tile_idx: Scalar) -> Scalar:
        """Returns the number of pipeline steps before those of a tile.

        A local tile takes more steps than a remote one: they bring partial products of the peers.
        """
        local_tiles = jnp.maximum(tile_idx - self.remote_tiles_of_block(), 0)
        return tile_idx * self.steps + local_tiles * self.config.partial_steps

    # Who owns what.

    def first_row(self, owner: Scalar) -> Scalar:
        """Returns the first row that a device owns."""
        return 0 if self.problem.kind == "one_shot" else owner * self.problem.m

    def owns(self, owner: Scalar, row: Scalar) -> Scalar:
        """Returns whether a device owns rows of the block's tile that begins at `row`."""
        first = self.first_row(owner)
        return (row < first + self.problem.m) & (row + self.tiling.tile_m > first)

    def local_tile_index(self, owner: Scalar, tile: TileCoord) -> Scalar:
        """Returns the index of a tile among those that are local to its owner."""
        m_index = lax.div(jnp.maximum(tile.row - self.first_row(owner), 0), self.tiling.tile_m)
        n_index = self.tiling.cluster[1] * tile.cluster_n + lax.axis_index(BLOCK_AXES[1])
        return (tile.batch * self.config.row_tiles + m_index) * self.config.column_tiles + n_index

    @property
    def warpgroup_tile_spans_owners(self) -> bool:
        """Whether a consumer's part of a tile has the rows of several owners."""
        return self.problem.kind != "one_shot" and self.problem.m < self.tiling.warpgroup_tile[0]

    def regions_for(
        self, tile: EpilogueTiles, plane: Ref, owner: Scalar, row: Scalar, column: Scalar
    ) -> Iterator[tuple[Ref, Ref, Scalar]]:
        """Yields the regions of an epilogue tile that may belong to an owner.

        The size of a copy is static, so there is one region for each number of rows that an owner
        may get: all rows of the tile, or the remainder of its own rows.

        Args:
          tile: the epilogue tile.
          plane: the plane to store it in, [n / epilogue_tile_n, m, epilogue_tile_n].
          owner: the device that owns the rows.
          row: first row of the epilogue tile in the product.
          column: first column.

        Yields:
          The region of the tile, where it belongs in the plane, and whether it is to be copied.
        """
        above, below, count = self._owned_rows(owner, row)
        to = plane.at[lax.div(column, self.tiling.epilogue_tile_n)]
        for height in self.config.one_owner_rows:
            region, place = tile.raw.at[pl.ds(above, height)], to.at[pl.ds(below, height)]
            yield region, place, (count == height) & (column < self.problem.n)

    def local_regions(
        self, tile: Ref, plane: Ref, row: Scalar, column: Scalar
    ) -> Iterator[tuple[Ref, Ref, Scalar]]:
        """Yields the regions of an epilogue tile that this device may own.

        Args:
          tile: the epilogue tile, swizzled.
          plane: the plane to store it in, [m, n].
          row: first row of the epilogue tile in the product.
          column: first column.

        Yields:
          The region of the tile, where it belongs in the plane, and whether it is to be copied.
        """
        columns = pl.ds(column, self.tiling.epilogue_tile_n)
        # TMA leaves out columns beyond the end only if there are several epilogue tiles: see
        # `PersistentGemm.store_epilogue_tile`.
        within = column < self.problem.n
        if self.warpgroup_tile_spans_owners:
            above, below, count = self._owned_rows(self.rendezvous.axis_index, row)
            for height in self.config.one_owner_rows:
                has_it = within & (count == height)
                start = jnp.where(has_it, above, 0)
                region = tile.at[pl.ds(start, height)]
                yield region, plane.at[pl.ds(jnp.where(has_it, below, 0), height), columns], has_it
            return
        first = self.first_row(self.rendezvous.axis_index)
        within &= (row >= first) & (row < first + self.problem.m)
        start = jnp.where(within, row - first, 0)
        yield tile, plane.at[pl.ds(start, self.tiling.warpgroup_tile[0]), columns], within

    def _owned_rows(self, owner: Scalar, row: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """The rows that an owner has of a consumer's part of a tile, which begins at `row`.

        Returns:
          The rows of the part above the owner's, the owner's rows above the part, and the number of
          rows that are in both; not above zero if there are none.
        """
        first = self.first_row(owner)
        above, below = jnp.maximum(first - row, 0), jnp.maximum(row - first, 0)
        count = jnp.minimum(self.problem.m - below, self.tiling.warpgroup_tile[0] - above)
        return above, below, count
