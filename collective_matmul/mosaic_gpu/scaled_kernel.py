"""The GEMM with operands in 8 bits and their scales.

`collective_matmul.fp8` says which numbers have a scale in common. There are two cases:

- A row of x, and a column of w. The scales multiply the sums, in the epilogue.
- 128 numbers of a row of x, and a block of 128 × 128 of w. Each k-block is such a block. So its
  products are summed in registers of their own, and then scaled and added to the tile's sums. As
  tensor cores add 8-bit products with fewer bits than float32 has, this is more accurate too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul._compat import load_in_layout
from collective_matmul.fp8 import BLOCK
from collective_matmul.mosaic_gpu.kernel_types import (
    Operands,
    Ref,
    Scalar,
    Stages,
    TileCoord,
)
from collective_matmul.mosaic_gpu.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.operands import Operand
from collective_matmul.mosaic_gpu.tiling import Tiling

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


class ScaledGemm(PersistentGemm):
    """``outs[q][b] = sum over p of xs[p][b] @ ws[p][q]``, where each operand has scales.

    An MMA warpgroup's part of a tile is 64 rows high. The references to the scales are attributes,
    set in `run`, all of float32:

    - `x_scales`: [planes, rows, any], with the planes of the xs. From column `first_scale` on, a
      row has its scale, or the scales of all its k-blocks.
    - `w_scales`: of each result [columns], or [ceil(columns / 128), steps] in blocks.

    Scales of rows and columns are the same for all terms. They are as many as tiles have.
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
        assert tiling.warpgroup_tile[0] == 64
        assert not in_blocks or tiling.tile_n == tiling.tile_k == BLOCK
        self.in_blocks, self.first_scale = in_blocks, first_scale
        self.dtypes = xs[0].array.dtype, ws[0][0].array.dtype, outs[0].dtype
        self.x_scales: Ref = None
        self.w_scales: Sequence[Ref] = ()

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are the xs, the ws of each x, their scales, the results."""
        remaining = iter(refs)
        xs = list(itertools.islice(remaining, len(self.xs)))
        ws = [list(itertools.islice(remaining, self.results)) for _ in self.xs]
        self.x_scales = next(remaining)
        self.w_scales = list(itertools.islice(remaining, self.results))
        outs = list(remaining)

        @functools.partial(pl.run_scoped, **self.scratch(None), collective_axes="warpgroup")
        def _(**scratch: Ref) -> None:
            self.run_warpgroup(Operands(indices, xs, ws), outs, scratch)

    def shared_memory(self, dtype: Any) -> dict[str, Any]:
        """Returns the stages and the epilogue tiles, swizzled for wgmma and TMA."""
        del dtype
        tiling, (x_dtype, w_dtype, out_dtype) = self.tiling, self.dtypes
        stages, width = tiling.max_concurrent_steps, tiling.epilogue_tile_n

        def swizzled(dtype: Any, *shape: int) -> Any:
            transforms = (
                plgpu.TilingTransform((8, shape[-1])),
                plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize),
            )
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        return {
            "x_stages": swizzled(x_dtype, stages, tiling.tile_m, tiling.tile_k),
            "w_stages": swizzled(w_dtype, stages, tiling.tile_n, tiling.tile_k),
            "store_tiles": swizzled(out_dtype, 2, tiling.epilogue_stages, 64, width),
        }

    def x_plane(self, indices: Ref, batch: Scalar) -> Scalar:
        """Returns the plane of the xs, and of their scales, that a batch reads."""
        x = self.xs[0]
        return indices[x.index] + batch * x.per_batch

    def run_mma_warpgroup(
        self, indices: Ref, consumer: Scalar, stages: Stages, store_tiles: Ref, outs: Any
    ) -> None:
        """Executes one MMA warpgroup: multiplies its part of each tile, scales and stores it."""
        row_offset, store_tiles = consumer * 64, store_tiles.at[consumer]
        multiply = self.multiply_blocks if self.in_blocks else self.multiply_rows

        def visit(tile: TileCoord) -> None:
            def store(q: int, column: Scalar, product: jax.Array) -> None:
                plane = outs[q].at[self.out_plane(indices, tile.batch)]
                self.store(product, plane, tile.row + row_offset, column, store_tiles)

            multiply(indices, tile, row_offset, stages, store)

        self.for_each_tile(visit)
        plgpu.wait_smem_to_gmem(0)

    def read_x_scales(
        self, indices: Ref, tile: TileCoord, row_offset: Scalar, step: Scalar
    ) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0."""
        plane, rows = self.x_plane(indices, tile.batch), pl.ds(tile.row + row_offset, 64)
        scales = self.x_scales.at[plane, rows, self.first_scale + step]
        return load_in_layout(scales, plgpu.Layout.WGMMA.reduce(1))

    def multiply_rows(
        self, indices: Ref, tile: TileCoord, row_offset: Scalar, stages: Stages, store: Any
    ) -> None:
        """Multiplies, scales rows and columns of the sums, and stores them."""
        columns = self.tiling.tile_n

        def multiply(q: int, column: Scalar) -> None:
            # Read before k-blocks are multiplied: afterwards, the tensor cores would wait for them.
            x_scales = self.read_x_scales(indices, tile, row_offset, 0)
            w_scales = self.w_scales[q].at[pl.ds(column, columns)]
            w_scales = load_in_layout(w_scales, plgpu.Layout.WGMMA.reduce(0))

            @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((64, columns), jnp.float32))
            def _(accumulator: Ref) -> None:
                parts = pl.ds(row_offset, 64), pl.ds(0, columns)
                self.mma(accumulator, tile.tile_idx, *parts, stages)
                product = accumulator[...]
                plgpu.barrier_arrive(stages.empty.at[self.stage(tile.tile_idx, self.steps - 1)])
                scaled = product * lax.broadcast_in_dim(x_scales, product.shape, (0,))
                store(q, column, scaled * lax.broadcast_in_dim(w_scales, product.shape, (1,)))

        self.on_result(tile.cluster_n, multiply)

    def multiply_blocks(
        self, indices: Ref, tile: TileCoord, row_offset: Scalar, stages: Stages, store: Any
    ) -> None:
        """Multiplies k-block by k-block, scales each product, and stores their sums."""

        def multiply(q: int, column: Scalar) -> None:
            # Tiles beyond the last column exist; what they compute is not stored.
            last_block = self.w_scales[q].shape[0] - 1
            block = jnp.minimum(lax.div(column, BLOCK), last_block)

            def read_scales(step: Scalar) -> tuple[jax.Array, Scalar]:
                step = jnp.minimum(step, self.steps - 1)
                x_scales = self.read_x_scales(indices, tile, row_offset, step)
                return x_scales, self.w_scales[q][block, step]

            def add(step: Scalar, carry: Any) -> Any:
                total, stage, (x_scales, w_scale) = carry
                # The next step's scales are read now, as that takes long, and after the last use of
                # this step's: so they get the same registers. Copying them from others would wait.
                scales = x_scales * w_scale
                following = read_scales(step + 1)
                product = self.multiply_block(stage, row_offset, stages)
                total += product * lax.broadcast_in_dim(scales, product.shape, (0,))
                # Cheaper than a remainder.
                last = stage == self.tiling.max_concurrent_steps - 1
                return total, jnp.where(last, 0, stage + 1), following

            zeros = jnp.zeros((64, BLOCK), jnp.float32)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            carry = zeros, self.stage(tile.tile_idx, 0), read_scales(0)
            total, *_ = lax.fori_loop(0, self.steps, add, carry)
            store(q, column, total)

        self.on_result(tile.cluster_n, multiply)

    def multiply_block(self, stage: Scalar, row_offset: Scalar, stages: Stages) -> jax.Array:
        """Returns the product [64, 128] of a stage's k-blocks, and frees the stage."""
        plgpu.barrier_wait(stages.full.at[stage])
        x, w = stages.x.at[stage, pl.ds(row_offset, 64), :], stages.w.at[stage]

        def multiply(accumulator: Ref) -> jax.Array:
            plgpu.wgmma(accumulator, x, w.transpose((1, 0)))
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.ACC((64, BLOCK), jnp.float32))
        plgpu.barrier_arrive(stages.empty.at[stage])
        return product
