"""The GEMM with operands in 8 bits and their scales.

There are two cases of which numbers have a scale in common:

- A row of x, and a column of w. The scales multiply the sums, in the epilogue.
- 128 numbers of a row of x, and a block of 128 × 128 of w. Each k-block is such a block. So its
  products are summed in registers of their own, and then scaled and added to the tile's sums. As
  tensor cores add 8-bit products with fewer bits than float32 has, this is more accurate too.

`ScaledMultiplication` is what they have in common with kernels that communicate: what the MMA
warpgroups do with a tile. `ScaledGemm` multiplies chunks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul._compat import load_in_layout
from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.mosaic_gpu.kernel_types import (
    InParts,
    Ref,
    Scalar,
    Stages,
    TileCoord,
    TilePart,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


#: Numbers of a row, and rows and columns of a weight, that have a scale in common: "blocks".
BLOCK = 128
#: The parts of operands that have scales: rows of x and columns of w, or blocks of both.
ScaledParts = Literal["rows", "blocks"]


def can_scale(tiling: Tiling, scales: ScaledParts) -> bool:
    """Whether `ScaledMultiplication` can have this tiling."""
    rows, columns = tiling.warpgroup_tile
    if scales == "blocks" and columns != BLOCK:
        return False
    return rows == 64 and columns % 64 == 0 and tiling.tile_k == BLOCK


class ScaledMultiplication(PersistentGemm, ABC):
    """The multiplication of a GEMM with operands in 8 bits: to be inherited before its class.

    An MMA warpgroup's part of a tile is 64 rows high. Scales of rows and columns are the same for
    all terms of a sum.

    Attributes:
      in_blocks: whether blocks have the scales; else rows and columns have them.
      w_scales: float32, of all results side by side, each as wide as its tiles: [columns], or
        [columns / 128, steps] in blocks. Set when the kernel runs.
      scales_arrive: whether scales of x are there only when the first k-block is.
    """

    in_blocks: bool
    w_scales: Ref = None
    scales_arrive = False

    @abstractmethod
    def read_x_scales(self, tile: TileCoord, part: TilePart, step: Scalar) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0.

        They are in the layout of the rows of wgmma's results.
        """

    def w_scales_of(self, tile: TileCoord) -> Ref:
        """Returns the scales of w, as `w_scales`, for a tile."""
        del tile
        return self.w_scales

    def multiply(
        self, tile: TileCoord, part: TilePart, stages: Stages, in_parts: InParts | None = None
    ) -> jax.Array:
        """Returns the scaled product of a part of a tile; see `PersistentGemm.multiply`."""
        assert in_parts is None or not self.scales_arrive
        assert can_scale(self.tiling, "blocks" if self.in_blocks else "rows")
        multiply = self.multiply_blocks if self.in_blocks else self.multiply_rows
        return multiply(tile, part, stages, in_parts)

    def multiply_rows(
        self, tile: TileCoord, part: TilePart, stages: Stages, in_parts: InParts | None
    ) -> jax.Array:
        """Multiplies, and scales rows and columns of the sums."""
        shape = self.tiling.warpgroup_tile
        # Scales are read before k-blocks are multiplied: afterwards, the tensor cores would wait
        # for them.
        columns = pl.ds(self.first_column(tile) + part.column_offset, shape[1])
        w_scales = load_in_layout(self.w_scales_of(tile).at[columns], plgpu.Layout.WGMMA.reduce(0))

        def accumulate(accumulator: Ref) -> jax.Array:
            if self.scales_arrive:
                mma = functools.partial(self.mma, accumulator, tile.tile_idx, part, stages)
                mma((0, 1))
                x_scales = self.read_x_scales(tile, part, 0)
                mma((1, self.steps))
            else:
                x_scales = self.read_x_scales(tile, part, 0)
                self.accumulate(accumulator, tile, part, stages, in_parts)
            scaled = self.product_of(accumulator, tile, stages)
            # As in `collective_matmul.operands.scaled.scaled_matrix.scaled_sums`.
            scaled *= lax.broadcast_in_dim(jnp.minimum(x_scales, 1.0), shape, (0,))
            scaled *= lax.broadcast_in_dim(w_scales, shape, (1,))
            return scaled * lax.broadcast_in_dim(jnp.maximum(x_scales, 1.0), shape, (0,))

        return pl.run_scoped(accumulate, accumulator=plgpu.ACC(shape, jnp.float32))

    def multiply_blocks(
        self, tile: TileCoord, part: TilePart, stages: Stages, in_parts: InParts | None
    ) -> jax.Array:
        """Multiplies k-block by k-block, scales each product, and adds them."""
        block = lax.div(self.first_column(tile) + part.column_offset, BLOCK)
        scales_of_w = self.w_scales_of(tile)

        def read_scales(step: Scalar) -> tuple[jax.Array, Scalar]:
            step = jnp.minimum(step, self.steps - 1)
            return self.read_x_scales(tile, part, step), scales_of_w[block, step]

        def add(step: Scalar, carry: Any, waited: bool = False) -> Any:
            total, stage, (x_scales, w_scale) = carry
            # The next step's scales are read now, as that takes long, and after the last use of
            # this step's: so they get the same registers. Copying them from others would wait.
            # Blocks of zero sums times an infinite scale would be NaN.
            scales = jnp.minimum(x_scales * w_scale, jnp.finfo(jnp.float32).max)
            following = read_scales(step + 1)
            product = self.multiply_block(stage, part, stages, waited)
            total += product * lax.broadcast_in_dim(scales, product.shape, (0,))
            # Cheaper than a remainder.
            last = stage == self.tiling.max_concurrent_steps - 1
            return total, jnp.where(last, 0, stage + 1), following

        def mma(start: Scalar, stop: Scalar, carry: Any) -> Any:
            return lax.fori_loop(start, stop, add, carry)

        zeros = jnp.zeros((64, BLOCK), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        stage = self.stage(tile.tile_idx, 0)
        if self.scales_arrive:
            plgpu.barrier_wait(stages.full.at[stage])
            carry = mma(1, self.steps, add(0, (zeros, stage, read_scales(0)), waited=True))
        else:
            carry = zeros, stage, read_scales(0)
            carry = mma(0, self.steps, carry) if in_parts is None else in_parts(mma, carry)
        return carry[0]

    def multiply_block(
        self, stage: Scalar, part: TilePart, stages: Stages, waited: bool
    ) -> jax.Array:
        """Returns the product [64, 128] of a stage's k-blocks, and frees the stage."""
        if not waited:
            plgpu.barrier_wait(stages.full.at[stage])
        x = stages.x.at[stage, pl.ds(part.row_offset, 64), :]
        w = stages.w.at[stage].at[pl.ds(part.column_offset, BLOCK), :]

        def multiply(accumulator: Ref) -> jax.Array:
            plgpu.wgmma(accumulator, x, w.transpose((1, 0)))
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.ACC((64, BLOCK), jnp.float32))
        plgpu.barrier_arrive(stages.empty.at[stage])
        return product


class ScaledGemm(ScaledMultiplication):
    """``outs[q][b] = sum over p of xs[p][b] @ ws[p][q]``, where each operand has scales.

    Scales of the xs are float32 [planes, rows, any], with the planes of the xs, and at least as
    many rows as tiles have. From column `first_scale` on, a row has its scale, or the scales of all
    its k-blocks.
    """

    def __init__(
        self,
        xs: Sequence[Operand],
        ws: Sequence[Sequence[Operand]],
        outs: Sequence[Any],
        batch: int,
        tiling: Tiling,
        *,
        in_blocks: bool,
        first_scale: int,
    ):
        """Describes the kernel for operands and results of these shapes."""
        super().__init__(xs, ws, outs, batch, 1, tiling)
        self.in_blocks, self.first_scale = in_blocks, first_scale
        # Set in `run`.
        self.indices: Ref = None
        self.x_scales: Ref = None

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are the scales, the xs, the ws of each x, the results."""
        self.indices, (self.x_scales, self.w_scales) = indices, refs[:2]
        super().run(indices, *refs[2:])

    def read_x_scales(self, tile: TileCoord, part: TilePart, step: Scalar) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0."""
        x, row = self.xs[0], tile.row + part.row_offset
        plane = self.indices[x.index] + tile.batch * x.per_batch
        return load_row_scales(self.x_scales, plane, row, self.first_scale + step)


def load_row_scales(scales: Ref, plane: Scalar, row: Scalar, column: Scalar) -> jax.Array:
    """Returns 64 rows of a column of float32 [planes, rows, columns], all of them there."""
    column = scales.at[plane, pl.ds(row, 64), column]
    return load_in_layout(column, plgpu.Layout.WGMMA.reduce(1))
