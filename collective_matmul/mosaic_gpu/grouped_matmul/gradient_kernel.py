"""The persistent GEMM that contracts the rows of each group: gradients of the groups' matrices.

``out[g] = sum over p of lefts[p][rows of g]ᵀ @ rights[p][rows of g]``, or added to what out has

Tiles of the result are visited group by group, and a tile has as many pipeline steps as its group
needs, none if the group has no rows. K-blocks of rows begin at multiples of 8, as TMA needs. The
load warpgroup copies the first and the last k-block of a group itself, with zeros for the rows of
other groups; and all k-blocks of rows that come by index. See `matmul_kernel` for all else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul._compat import load_in_layout
from collective_matmul.mosaic_gpu.grouped_matmul import row_loader
from collective_matmul.mosaic_gpu.grouped_matmul.row_copies import (
    RowRange,
    start_copy_of_rows,
    wait_for_copies,
)
from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE, Tiling
from collective_matmul.mosaic_gpu.kernel_types import (
    Operands,
    PipelineStep,
    Ref,
    Scalar,
    Stages,
    TileCoord,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


def fills(tiling: Tiling, contracted: int, columns: int) -> bool:
    """Whether tiles, and those of clusters, fill matrices [K, N]."""
    tiles = zip((tiling.tile_m, tiling.tile_n), tiling.cluster, strict=True)
    sizes = zip((contracted, columns), tiles, strict=True)
    return all(size % (tile * blocks) == 0 for size, (tile, blocks) in sizes)


class _Side(NamedTuple):
    """One operand of a part.

    Attributes:
      array: [M, columns] in global memory, or [S, columns] with `index`.
      index: int32 [M], or None.
      columns: those of the tile.
      stages: shared memory for its k-blocks.
      axis: the axis of the cluster whose blocks have them in common, or None.
      clips: whether tiles may be beyond the last column.
    """

    array: Ref
    index: Ref | None
    columns: Any
    stages: Ref
    axis: str | None
    clips: bool


class GroupedOuterGemm(PersistentGemm):
    """The body of the kernel. A tile's batch is its group, and `tile_idx` is its first step."""

    def __init__(
        self,
        lefts: Sequence[Any],
        rights: Sequence[Any],
        out: Any,
        tiling: Tiling,
        *,
        left_indexed: bool,
        right_indexed: bool,
        adds: bool,
        interpreted: bool,
    ):
        """Describes the kernel for operands and results of these shapes.

        Args:
          lefts: [1, M_p, K], or [1, S_p, K] if they come by index.
          rights: likewise [1, M_p, N].
          out: [G, K, N].
          tiling: how the matmul is tiled.
          left_indexed: whether rows of the lefts come by index. Then no tile of them is multicast.
          right_indexed: likewise of the rights; not both.
          adds: whether sums are added to what `out` has, in float32. Tiles must fill it: see
            `fills`.
          interpreted: whether this runs in Pallas' interpreter.
        """
        assert not (left_indexed and right_indexed)
        if left_indexed or right_indexed:
            assert tiling.max_concurrent_steps >= row_loader.LEAST_STAGES
        xs = [Operand(left, 1) for left in lefts]
        ws = [[Operand(right, 1)] for right in rights]
        super().__init__(xs, ws, [out], out.shape[0], 1, tiling)
        self.left_indexed, self.right_indexed = left_indexed, right_indexed
        self.adds, self.interpreted = adds, interpreted
        # Copying takes more registers than starting TMA does.
        self.load_registers, self.mma_registers = 56, 224
        # Set in `run`.
        self.bounds: Sequence[Ref] = ()
        self.indexes: Sequence[Ref] = ()

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are bounds of groups, indexes, lefts, rights, the result."""
        parts = len(self.xs)
        count = 2 * parts if self.left_indexed or self.right_indexed else parts
        self.bounds, self.indexes = refs[:parts], refs[parts:count]
        super().run(indices, *refs[count:])

    def for_each_tile(self, visit: Callable[[TileCoord], None]) -> Scalar:
        """Calls ``visit(tile)`` for each of this block's tiles. Returns the sum of their steps."""
        tiles = (self.cluster_tiles,)

        @plgpu.nd_loop(tiles, collective_axes="cluster", init_carry=jnp.int32(0))
        def steps(info: Any, carry: Scalar) -> Scalar:
            (index,) = info.index
            tile = self.tile_at(index, carry)
            visit(tile)
            return carry + self.steps_of(tile)

        return steps

    def first_step(self, tile_idx: Scalar) -> Scalar:
        """Returns the number of pipeline steps before those of a tile."""
        return tile_idx

    def steps_of(self, tile: TileCoord) -> Scalar:
        """Returns the number of pipeline steps of a tile."""
        return sum(self.steps_of_rows(self.rows_of(p, tile)) for p in range(len(self.xs)))

    def rows_of(self, part: int, tile: TileCoord) -> RowRange:
        """Returns the rows of a tile's group, in k-blocks from a multiple of 8 on."""
        start, end = (self.bounds[part][2 * tile.batch + i] for i in range(2))
        return RowRange(lax.div(start, ROW_MULTIPLE) * ROW_MULTIPLE, start, end)

    def steps_of_rows(self, rows: RowRange) -> Scalar:
        """Returns the number of k-blocks of a group's rows."""
        tile_k = self.tiling.tile_k
        steps = lax.div(rows.end - rows.first + (tile_k - 1), tile_k)
        return jnp.where(rows.start < rows.end, steps, 0)

    # The load warpgroup.

    def load_tiles(self, operands: Operands, stages: Stages) -> None:
        """Loads the k-blocks of all tiles, each as soon as its stage is empty."""
        steps = self.for_each_tile(functools.partial(self.load_tile, operands, stages))
        if self.left_indexed or self.right_indexed:
            row_loader.finish(steps, stages.full, self.tiling.max_concurrent_steps)
        self.wait_until_empty(steps, stages)

    def load_tile(
        self,
        operands: Operands,
        stages: Stages,
        tile: TileCoord,
        in_parts: Callable[[Callable, int], None] | None = None,
    ) -> None:
        """Loads all k-blocks that a tile is the product of."""
        assert in_parts is None
        w_axis, x_axis = self.multicast_axes
        tiling, first = self.tiling, tile.tile_idx
        rows, columns = pl.ds(tile.row, tiling.tile_m), self.first_column(tile)
        columns = pl.ds(columns, tiling.tile_n)
        left_clips, right_clips = (
            operands.xs[0].shape[2] % (tiling.tile_m * tiling.cluster[0]) != 0,
            operands.ws[0][0].shape[2] % (tiling.tile_n * tiling.cluster[1]) != 0,
        )
        for p in range(len(self.xs)):
            index = self.indexes[p] if self.indexes else None
            left_index = index if self.left_indexed else None
            right_index = index if self.right_indexed else None
            left = _Side(operands.xs[p].at[0], left_index, rows, stages.x, x_axis, left_clips)
            right_rows = operands.ws[p][0].at[0]
            right = _Side(right_rows, right_index, columns, stages.w, w_axis, right_clips)
            of_group = self.rows_of(p, tile)
            steps = self.steps_of_rows(of_group)
            self.load_part(first, steps, of_group, (left, right), stages)
            first += steps

    def load_part(
        self,
        first: Scalar,
        steps: Scalar,
        rows: RowRange,
        sides: tuple[_Side, _Side],
        stages: Stages,
    ) -> None:
        """Loads the k-blocks of one part of the sum.

        Args:
          first: the step, of the block, at which the part begins.
          steps: their number.
          rows: of the group.
          sides: both operands.
          stages: to load to.
        """
        tile_k, depth = self.tiling.tile_k, self.tiling.max_concurrent_steps

        @pl.loop(0, steps)
        def _(step: Scalar) -> None:
            number = first + step
            at = PipelineStep(number, lax.rem(number, depth))

            @pl.when(number >= depth)
            def _() -> None:
                plgpu.barrier_wait(stages.empty.at[at.stage])

            k_block = rows._replace(first=rows.first + step * tile_k)
            followed = [side for side in sides if side.index is None]
            for side in sides:
                if side.index is not None:
                    self.copy(side, k_block, at)
                    row_loader.arrive_later(number, stages.full, depth)
            self.load_followed(followed, k_block, at, stages.full)

    def load_followed(
        self, sides: Sequence[_Side], k_block: RowRange, at: PipelineStep, full: Ref
    ) -> None:
        """Loads a k-block whose rows follow each other: by TMA if all of them are the group's."""
        height, full = self.tiling.tile_k, full.at[at.stage]
        is_whole = (k_block.start <= k_block.first) & (k_block.first + height <= k_block.end)

        @pl.when(is_whole)
        def _() -> None:
            for side in sides:
                source = side.array.at[pl.ds(k_block.first, height), side.columns]
                to = side.stages.at[at.stage]
                plgpu.copy_gmem_to_smem(source, to, full, collective_axes=side.axis)

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            for side in sides:
                self.copy(side, k_block, at)
            wait_for_copies(0)
            for _ in sides:
                plgpu.barrier_arrive(full)

    def copy(self, side: _Side, k_block: RowRange, at: PipelineStep) -> None:
        """Starts to copy a k-block's rows of the group, and zeros for others."""
        to, column = side.stages.at[at.stage], side.columns.start
        options = {"clips": side.clips, "interpreted": self.interpreted}
        start_copy_of_rows(side.array, side.index, k_block, column, to, **options)

    # The MMA warpgroups.

    @property
    def writes_all(self) -> bool:
        """Whether results are new arrays."""
        return not self.adds

    def finished(self, value: jax.Array, plane: Ref, row: Scalar, column: Scalar) -> jax.Array:
        """Returns an epilogue tile of a product, added to what the result has there."""
        if not self.adds:
            return value
        place = tuple(
            pl.ds(start, size) for start, size in zip((row, column), value.shape, strict=True)
        )
        return value + load_in_layout(plane.at[place], plgpu.Layout.WGMMA).astype(value.dtype)

    def product_of(self, accumulator: Ref, tile: TileCoord, stages: Stages) -> jax.Array:
        """Returns the value of an accumulator to which all k-blocks of a tile were added."""
        # Reading the accumulator waits for the last wgmma, so the last stage is free too.
        product, steps = accumulator[...], self.steps_of(tile)

        @pl.when(steps > 0)
        def _() -> None:
            plgpu.barrier_arrive(stages.empty.at[self.stage(tile.tile_idx, steps - 1)])

        return product
