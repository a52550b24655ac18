"""The persistent, warp-specialised GEMM for Hopper GPUs that all kernels here consist of.

The algorithm:

1. One block per multiprocessor stays for the whole launch, and computes one tile of the results
   after the other (a *persistent* GEMM).
2. Its warpgroups have different roles (*warp specialisation*). The load warpgroup, the producer,
   copies k-blocks of x and w by TMA into a ring of shared-memory stages. Two MMA warpgroups, the
   consumers, multiply them by wgmma, each its part of the tile, and store the rounded sums by TMA,
   epilogue tile by epilogue tile.
3. Two barriers for each stage connect them: `full`, when both k-blocks have arrived, and `empty`,
   when all readers are done. The load warpgroup does not stop at the end of a tile: it loads the
   next tile's first k-blocks while the MMA warpgroups store the last one.
4. The blocks of a cluster compute neighbouring tiles, and multicast to each other the k-blocks that
   these have in common.

Kernels that communicate are subclasses of `PersistentGemm`. They load operands that arrive later,
from other arrays, or store tiles elsewhere. `scaled_kernel` has the multiplication of operands in
8 bits, which takes the place of `PersistentGemm.multiply` in any of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import nvvm

from collective_matmul._compat import in_place_kernel
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tile_loader import TileLoader
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import BLOCK_AXES
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import CONSUMERS, ITEMSIZE, Tiling
from collective_matmul.mosaic_gpu.kernel_types import (
    InParts,
    Operands,
    Ref,
    Scalar,
    Stages,
    TileCoord,
    TilePart,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


@plgpu.inline_mgpu()
def wgmma_fence(_: Any) -> None:
    """Orders the accumulator's registers before a wgmma; Pallas has no such fence.

    Without this ptxas adds fences itself. Where it cannot prove that all lanes arrive together, it
    makes each wgmma wait for the one before.
    """
    nvvm.wgmma_fence_aligned()


class PersistentGemm(TileLoader):
    """The body of the kernel, and the static facts that it is built from.

    ``outs[q][b] = sum over p of xs[p][b] @ ws[p][q]``. See `matmul` for the operands.
    """

    # Loading needs few of a multiprocessor's 512 registers per lane; accumulators get the rest.
    load_registers = 40
    mma_registers = 232

    def __init__(
        self,
        xs: Sequence[Operand],
        ws: Sequence[Sequence[Operand]],
        outs: Sequence[Any],
        batch: int,
        contracted_planes: int,
        tiling: Tiling,
        out_column_blocks: int = 1,
    ):
        """Describes the kernel for operands and results of these shapes."""
        columns = [out.shape[2] // out_column_blocks for out in outs]
        super().__init__(xs, ws, tiling, batch, outs[0].shape[1], columns, contracted_planes)
        self.dtypes = xs[0].array.dtype, ws[0][0].array.dtype, outs[0].dtype
        count = len(xs) * (1 + len(outs))
        self.out_index, self.out_column_block = count, 2 * count + 1
        self.out_column_blocks = out_column_blocks
        self.planes_per_batch = outs[0].shape[0] // batch

    def kernel(
        self,
        outs: Sequence[jax.Array],
        name: str,
        multiprocessors: int,
        interpret: Any = False,
        *,
        writes_all: bool = False,
    ) -> Callable:
        """Returns the function that launches the kernel and returns `outs`, written in place.

        With `writes_all` they are new arrays: see `in_place_kernel`.
        """
        mesh = plgpu.Mesh(
            grid=(multiprocessors // math.prod(self.tiling.cluster),),
            grid_names=("cluster",),
            cluster=self.tiling.cluster,
            cluster_names=BLOCK_AXES,
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=name,
        )
        options = {"interpret": interpret, "name": name, "writes_all": writes_all}
        return in_place_kernel(self.run, mesh, outs, **options)

    @property
    def writes_all(self) -> bool:
        """Whether its tiles are all elements of the results."""
        return self.planes_per_batch == self.out_column_blocks == 1

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are the xs, the ws of each x, and the results."""
        remaining = iter(refs)
        xs = list(itertools.islice(remaining, len(self.xs)))
        ws = [list(itertools.islice(remaining, self.results)) for _ in self.xs]
        outs = list(remaining)

        @functools.partial(pl.run_scoped, **self.scratch(), collective_axes="warpgroup")
        def _(**scratch: Ref) -> None:
            self.run_warpgroup(Operands(indices, xs, ws), outs, scratch)

    def run_warpgroup(self, operands: Operands, outs: Any, scratch: dict[str, Any]) -> None:
        """Gives the warpgroup its role: the first `CONSUMERS` multiply, the last one loads."""
        warpgroup = lax.axis_index("warpgroup")
        stages = Stages(*(scratch[n] for n in ("x_stages", "w_stages", "full", "empty")))

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(self.load_registers, action="decrease")
            self.run_load_warpgroup(operands, stages, scratch)

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(self.mma_registers, action="increase")
            store_tiles = scratch["store_tiles"]
            self.run_mma_warpgroup(operands.indices, warpgroup, stages, store_tiles, outs)

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory and the barriers of a block, by name."""
        return {**self.shared_memory(), **self.barriers()}

    def shared_memory(self) -> dict[str, Any]:
        """Returns the stages and the epilogue tiles, swizzled for wgmma and TMA."""
        tiling, (x_dtype, w_dtype, out_dtype) = self.tiling, self.dtypes

        def swizzled(swizzle: int, dtype: Any, *shape: int) -> Any:
            transform = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
            return plgpu.SMEM(shape, dtype, transforms=(transform, plgpu.SwizzleTransform(swizzle)))

        def stages(operand: Operand, dtype: Any, free: int) -> Any:
            sizes = (tiling.tile_k, free)
            shape = sizes if operand.contracted == 1 else sizes[::-1]
            return swizzled(tiling.swizzle, dtype, tiling.max_concurrent_steps, *shape)

        epilogue_tile = (tiling.warpgroup_tile[0], tiling.epilogue_tile_n)
        store_tiles = CONSUMERS, tiling.epilogue_stages, *epilogue_tile
        return {
            "x_stages": stages(self.xs[0], x_dtype, tiling.tile_m),
            "w_stages": stages(self.ws[0][0], w_dtype, tiling.tile_n),
            "store_tiles": swizzled(self.epilogue_swizzle, out_dtype, *store_tiles),
        }

    @property
    def epilogue_swizzle(self) -> int:
        """Bytes over which epilogue tiles are swizzled: their whole rows."""
        return self.tiling.epilogue_tile_n * ITEMSIZE

    def barriers(self) -> dict[str, Any]:
        """Returns the barriers of the stages, see `Stages`."""
        tiling, shared_axes = self.tiling, tuple(filter(None, self.multicast_axes))
        readers = {"num_arrivals": CONSUMERS, "num_barriers": tiling.max_concurrent_steps}
        return {
            # Two arrivals: the copies of x and of w.
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=tiling.max_concurrent_steps),
            "empty": (
                plgpu.ClusterBarrier(collective_axes=shared_axes, **readers)
                if shared_axes
                else plgpu.Barrier(**readers)
            ),
        }

    # The load warpgroup.

    def run_load_warpgroup(
        self, operands: Operands, stages: Stages, scratch: dict[str, Any]
    ) -> None:
        """Executes the load warpgroup."""
        del scratch
        self.load_tiles(operands, stages)

    # The MMA warpgroups.

    def run_mma_warpgroup(
        self, indices: Ref, consumer: Scalar, stages: Stages, store_tiles: Ref, outs: Any
    ) -> None:
        """Executes one MMA warpgroup: multiplies its part of each tile and stores it."""
        part, store_tiles = self.part_of(consumer), store_tiles.at[consumer]

        def visit(tile: TileCoord) -> None:
            product = self.multiply(tile, part, stages)

            def store(q: int, column: Scalar) -> None:
                plane = outs[q].at[self.out_plane(indices, tile.batch)]
                column += part.column_offset + self.out_first_column(indices, plane)
                self.store_part(product, plane, tile, part, column, store_tiles)

            self.on_result(tile.cluster_n, store)

        self.for_each_tile(visit)
        plgpu.wait_smem_to_gmem(0)

    def part_of(self, consumer: Scalar) -> TilePart:
        """Returns the part of every tile that an MMA warpgroup multiplies."""
        rows, columns = self.tiling.warpgroup_tile
        if self.tiling.wg_dimension == "m":
            return TilePart(consumer * rows, 0)
        return TilePart(0, consumer * columns)

    def out_plane(self, indices: Ref, batch: Scalar) -> Scalar:
        """Returns the plane of each result that the tiles of a batch are stored in."""
        return batch * self.planes_per_batch + indices[self.out_index]

    def out_first_column(self, indices: Ref, plane: Ref) -> Scalar:
        """Returns the first column of the block of a result that is written."""
        blocks = self.out_column_blocks
        return 0 if blocks == 1 else indices[self.out_column_block] * (plane.shape[-1] // blocks)

    def multiply(
        self, tile: TileCoord, part: TilePart, stages: Stages, in_parts: InParts | None = None
    ) -> jax.Array:
        """Returns the product of a part of a tile, float32, and frees all its stages.

        Args:
          tile: the tile.
          part: the part of this warpgroup.
          stages: to read from.
          in_parts: called as ``in_parts(mma, carry)`` instead of ``mma(0, steps, carry)``: it calls
            ``carry = mma(start, stop, carry)`` for consecutive ranges of the steps.
        """

        def accumulate(accumulator: Ref) -> jax.Array:
            self.accumulate(accumulator, tile, part, stages, in_parts)
            return self.product_of(accumulator, tile, stages)

        shape = self.tiling.warpgroup_tile
        return pl.run_scoped(accumulate, accumulator=plgpu.ACC(shape, jnp.float32))

    def accumulate(
        self,
        accumulator: Ref,
        tile: TileCoord,
        part: TilePart,
        stages: Stages,
        in_parts: InParts | None,
    ) -> None:
        """Adds the products of all k-blocks of a tile. Arguments: see `multiply`."""

        def mma(start: Scalar, stop: Scalar, carry: None = None) -> None:
            self.mma(accumulator, tile.tile_idx, part, stages, (start, stop))

        mma(0, self.steps_of(tile)) if in_parts is None else in_parts(mma, None)

    def product_of(self, accumulator: Ref, tile: TileCoord, stages: Stages) -> jax.Array:
        """Returns the value of an accumulator to which all k-blocks of a tile were added."""
        # Reading the accumulator waits for the last wgmma, so the last stage is free too.
        product = accumulator[...]
        last = self.stage(tile.tile_idx, self.steps_of(tile) - 1)
        plgpu.barrier_arrive(stages.empty.at[last])
        return product

    def mma(
        self,
        accumulator: Ref,
        tile_idx: Scalar,
        part: TilePart,
        stages: Stages,
        steps: tuple[Scalar, Scalar],
    ) -> None:
        """Accumulates the products of a tile's k-blocks, and frees all stages but the last.

        Args:
          accumulator: to add to.
          tile_idx: number of the tile.
          part: the part of this warpgroup.
          stages: to read from.
          steps: a range of the tile's steps.
        """
        start, stop = steps
        rows, columns = self.tiling.warpgroup_tile
        x_part, w_part = pl.ds(part.row_offset, rows), pl.ds(part.column_offset, columns)
        x_contracted, w_contracted = self.xs[0].contracted, self.ws[0][0].contracted

        @pl.loop(start, stop)
        def _(step: Scalar) -> None:
            stage = self.stage(tile_idx, step)
            plgpu.barrier_wait(stages.full.at[stage])
            if x_contracted == 2:
                x = stages.x.at[stage, x_part, :]
            else:
                x = stages.x.at[stage].at[:, x_part].transpose((1, 0))
            if w_contracted == 1:
                w = stages.w.at[stage].at[:, w_part]
            else:
                w = stages.w.at[stage].at[w_part, :].transpose((1, 0))
            wgmma_fence()
            plgpu.wgmma(accumulator, x, w)
            # One wgmma may be in flight: the one before is done now, and its stage is free.
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(stages.empty.at[self.stage(tile_idx, step - 1)])

    def store_part(
        self,
        product: jax.Array,
        plane: Ref,
        tile: TileCoord,
        part: TilePart,
        column: Scalar,
        store_tiles: Ref,
    ) -> None:
        """Rounds the product of a part of a tile, and starts to store it in a plane."""
        self.store(product, plane, tile.row + part.row_offset, column, store_tiles)

    def store(
        self, product: jax.Array, plane: Ref, row: Scalar, column: Scalar, store_tiles: Ref
    ) -> None:
        """Rounds a product and starts to store it at (row, column), epilogue tile by tile."""
        width = self.tiling.epilogue_tile_n
        for number in range(self.tiling.epilogue_tiles_per_warpgroup):
            store_tile = store_tiles.at[number % self.tiling.epilogue_stages]
            value = product[:, number * width : (number + 1) * width]
            value = self.finished(value, plane, row, column + number * width)
            self.wait_for_store_tile(number)
            store_tile[...] = value.astype(store_tile.dtype)
            plgpu.commit_smem()
            self.store_epilogue_tile(store_tile, plane, row, column + number * width)

    def finished(self, value: jax.Array, plane: Ref, row: Scalar, column: Scalar) -> jax.Array:
        """Returns what is rounded and stored at (row, column) for an epilogue tile of a product."""
        del plane, row, column
        return value

    def wait_for_store_tile(self, number: int) -> None:
        """Waits until an epilogue tile's shared memory is free again.

        Store tiles are used in turn, from the first one on in every product. The product before may
        have ended with any of them, so the first epilogue tiles of a product wait for more copies.
        """
        at_most = min(number, self.tiling.epilogue_stages - 1)
        plgpu.wait_smem_to_gmem(at_most, wait_read_only=True)

    def store_epilogue_tile(self, store_tile: Ref, plane: Ref, row: Scalar, column: Scalar) -> None:
        """Starts to store an epilogue tile; TMA leaves out what is out of bounds."""
        rows, width = store_tile.shape

        def copy() -> None:
            place = pl.ds(row, rows), pl.ds(column, width)
            plgpu.copy_smem_to_gmem(store_tile, plane.at[place], commit_group=False)

        if plane.shape[-1] > width:
            copy()
        else:
            # The columns of a result that is one epilogue tile wide are no dimension of TMA's
            # descriptor, so TMA would not stop at their end.
            pl.when(column == 0)(copy)
        plgpu.commit_smem_to_gmem_group()
