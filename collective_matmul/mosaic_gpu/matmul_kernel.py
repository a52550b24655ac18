"""The kernel of a Hopper matmul: what its warpgroups do.

The algorithm: one persistent block per multiprocessor walks over the tiles of all results. A
producer warpgroup copies slices of x and w into a ring of shared-memory stages (TMA) and runs ahead
across the ends of tiles, while two consumer warpgroups multiply them (wgmma), each its part of the
tile, and store that part (TMA) while the next tile's slices are already arriving. The blocks of a
cluster work on neighbouring tiles and multicast to each other, within the GPU, what those have in
common.
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
from collective_matmul.mosaic_gpu.operands import Operand, reader
from collective_matmul.mosaic_gpu.tiling import CONSUMERS, ITEMSIZE, ROW_MULTIPLE, Tiling

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# Of a cluster: blocks that differ along the first multiply the same columns of w, along the second
# the same rows of x.
BLOCK_AXES = ("block_down", "block_across")


class Work:
    """The kernel's body, and the static facts it is built from.

    Kernels that communicate too are made of the same parts: more to copy, tiles whose operands lie
    elsewhere or arrive later.
    """

    # Copying needs few of a multiprocessor's 512 registers per lane; the accumulators get the rest.
    copying_registers = 40
    multiplying_registers = 232

    def __init__(self, xs, ws, outs, batch, contracted_planes, tiling: Tiling):
        self.xs = [x._replace(array=None, index=p) for p, x in enumerate(xs)]
        numbers = itertools.count(len(xs))
        self.ws = [[w._replace(array=None, index=next(numbers)) for w in term] for term in ws]
        self.out_index = next(numbers)
        self.results = len(outs)
        self.planes_per_batch = outs[0].shape[0] // batch
        self.batch = batch
        self.contracted_planes = contracted_planes
        self.tiling = tiling
        # Of a tile's rows, those that there are. The copy engine takes longer to fill in others, of
        # which no result is stored. Blocks that share x each copy as many whole swizzles of it.
        self.x_rows = tiling.tile_m
        if xs[0].free == 1:
            multiple = ROW_MULTIPLE * tiling.cluster[1]
            self.x_rows = min(tiling.tile_m, pl.cdiv(xs[0].array.shape[1], multiple) * multiple)
        self.plane_steps = [pl.cdiv(x.array.shape[x.contracted], tiling.tile_k) for x in xs]
        self.steps = contracted_planes * sum(self.plane_steps)
        # What a cluster covers together counts as one tile of the walk.
        down_blocks, across_blocks = tiling.cluster
        self.down = pl.cdiv(outs[0].shape[1], tiling.tile_m * down_blocks)
        widths = [pl.cdiv(out.shape[2], tiling.tile_n * across_blocks) for out in outs]
        self.ends = list(itertools.accumulate(widths))
        self.across = self.ends[-1]

    def kernel(
        self, outs: Sequence[jax.Array], name: str, multiprocessors: int, interpret: Any = False
    ) -> Callable:
        """What launches it, one persistent block to a multiprocessor, and returns `outs`."""
        mesh = plgpu.Mesh(
            grid=(multiprocessors // math.prod(self.tiling.cluster),),
            grid_names=("cluster",),
            cluster=self.tiling.cluster,
            cluster_names=BLOCK_AXES,
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=name,
        )
        return in_place_kernel(self.run, mesh, outs, interpret=interpret, name=name)

    def run(self, indices, *refs) -> None:
        """What every warpgroup of every block runs."""
        refs = iter(refs)
        xs = list(itertools.islice(refs, len(self.xs)))
        ws = [list(itertools.islice(refs, self.results)) for _ in self.xs]
        outs = list(refs)

        @functools.partial(pl.run_scoped, **self.scratch(xs[0].dtype), collective_axes="warpgroup")
        def _(**scratch):
            self.play(indices, xs, ws, outs, scratch)

    def play(self, indices, xs, ws, outs, scratch: dict[str, Any]) -> None:
        """Gives the warpgroups their parts: the first ones consume, the last copies."""
        warpgroup = lax.axis_index("warpgroup")
        stages = tuple(scratch[n] for n in ("x_slices", "w_slices", "filled", "consumed"))

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(self.copying_registers, action="decrease")
            self.copy((indices, xs, ws), stages, scratch)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(self.multiplying_registers, action="increase")
            self.consume(indices, warpgroup, stages, scratch["strips"], outs)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """What the warpgroups of a block share, by name."""
        return {**self.shared_memory(dtype), **self.barriers()}

    def shared_memory(self, dtype: Any) -> dict[str, Any]:
        """The stages and the strips, laid out as wgmma and the copy engine read them fastest."""
        tiling = self.tiling

        def swizzled(swizzle: int, *shape: int) -> Any:
            tiling = plgpu.TilingTransform((8, swizzle // ITEMSIZE))
            return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

        def stages(operand: Operand, free: int) -> Any:
            sizes = (tiling.tile_k, free)
            shape = sizes if operand.contracted == 1 else sizes[::-1]
            return swizzled(tiling.swizzle, tiling.max_concurrent_steps, *shape)

        strip = (tiling.warpgroup_tile[0], tiling.epilogue_tile_n)
        return {
            "x_slices": stages(self.xs[0], tiling.tile_m),
            "w_slices": stages(self.ws[0][0], tiling.tile_n),
            "strips": swizzled(self.strip_swizzle, CONSUMERS, tiling.epilogue_stages, *strip),
        }

    @property
    def strip_swizzle(self) -> int:
        """Bytes over which strips are swizzled: their whole rows."""
        return self.tiling.epilogue_tile_n * ITEMSIZE

    def barriers(self) -> dict[str, Any]:
        """Filled: both slices are here. Consumed: every reader, in the cluster too, is done."""
        tiling = self.tiling
        shared = tuple(a for a, n in zip(BLOCK_AXES, tiling.cluster, strict=True) if n > 1)
        readers = {"num_arrivals": CONSUMERS, "num_barriers": tiling.max_concurrent_steps}
        return {
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=tiling.max_concurrent_steps),
            "consumed": (
                plgpu.ClusterBarrier(collective_axes=shared, **readers)
                if shared
                else plgpu.Barrier(**readers)
            ),
        }

    def walk(self, visit: Callable) -> None:
        """Calls ``visit(turn, batch, row, across)`` for each of this block's tiles.

        `turn` counts them, `row` is where the tile begins, and `on_result` takes `across`.
        """
        tiling, per_batch = self.tiling, self.down * self.across

        @plgpu.nd_loop((self.cluster_tiles,), collective_axes="cluster")
        def _(info):
            (index,) = info.index
            down, across = plgpu.planar_snake(
                lax.rem(index, per_batch),
                (self.down, self.across),
                0 if tiling.grid_minor_dim == "m" else 1,
                tiling.grid_tile_width,
            )
            down = tiling.cluster[0] * down + lax.axis_index(BLOCK_AXES[0])
            visit(info.local_index, lax.div(index, per_batch), down * tiling.tile_m, across)

    def on_result(self, across: Any, act: Callable) -> None:
        """Calls ``act(q, column)``, q a number: the result, and the column, at `across`."""
        for q, (start, end) in enumerate(itertools.pairwise([0, *self.ends])):
            tile = self.tiling.cluster[1] * (across - start) + lax.axis_index(BLOCK_AXES[1])
            here = functools.partial(act, q, tile * self.tiling.tile_n)
            here() if self.results == 1 else pl.when((across >= start) & (across < end))(here)

    def copy(self, operands, stages, scratch: dict[str, Any]) -> None:
        """What the warpgroup that copies does."""
        del scratch
        self.produce(operands, stages)

    def produce(self, operands, stages) -> None:
        """Fills the stages in turn, each as soon as all its readers let it go."""
        self.walk(functools.partial(self.load_tile, operands, stages))
        filled = self.first_step(self.turns())

        # No block may leave while another still signals to it.
        @pl.loop(0, jnp.minimum(filled, self.tiling.max_concurrent_steps))
        def _(slot):
            plgpu.barrier_wait(stages[3].at[slot])

    def load_tile(self, operands, stages, turn, batch, row, across, in_parts=None) -> None:
        """Copies all slices that a tile is the product of.

        `in_parts` is called with a function of the first step and the last, and how many steps
        there are: it copies them, in one or several calls.
        """
        indices, xs, ws = operands
        columns = self.tiling.tile_n

        def load_terms(q, column):
            first = self.first_step(turn)
            for p, steps in enumerate(self.plane_steps):
                x, w = self.xs[p], self.ws[p][q]
                read_x = reader(xs[p], x, indices, batch, pl.ds(row, self.x_rows))
                read_w = reader(ws[p][q], w, indices, batch, pl.ds(column, columns))
                load = functools.partial(self.load, first, steps, read_x, read_w, stages)
                count = self.contracted_planes * steps
                load(0, count) if in_parts is None else in_parts(load, count)
                first += count

        self.on_result(across, load_terms)

    def load(self, first, steps: int, read_x, read_w, stages, start, stop) -> None:
        """Copies slices of one term, which begins at stage number `first`, in a range of steps."""
        tiling = self.tiling
        x_slices, w_slices, filled, consumed = stages

        @pl.loop(start, stop)
        def _(step):
            count = first + step
            slot = lax.rem(count, tiling.max_concurrent_steps)

            @pl.when(count >= tiling.max_concurrent_steps)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            plane, within = (
                (0, step)
                if self.contracted_planes == 1
                else (lax.div(step, steps), lax.rem(step, steps))
            )
            along = pl.ds(within * tiling.tile_k, tiling.tile_k)
            # Blocks along one axis of the cluster share w, along the other x.
            w_axis, x_axis = (
                axis if blocks > 1 else None
                for axis, blocks in zip(BLOCK_AXES, tiling.cluster, strict=True)
            )
            x_place, w_place = x_slices.at[slot], w_slices.at[slot]
            if self.x_rows < tiling.tile_m:
                x_place = x_place.at[pl.ds(0, self.x_rows)]
            for read, place, axis in ((read_x, x_place, x_axis), (read_w, w_place, w_axis)):
                plgpu.copy_gmem_to_smem(
                    read(plane, along), place, filled.at[slot], collective_axes=axis
                )

    @property
    def cluster_tiles(self) -> int:
        """How many tiles all blocks visit together, counted by clusters."""
        return self.batch * self.down * self.across

    def turns(self) -> Any:
        """How many tiles this block visits."""
        clusters = lax.axis_size("cluster")
        return lax.div(self.cluster_tiles - lax.axis_index("cluster") + clusters - 1, clusters)

    def consume(self, indices, consumer, stages, strips, outs) -> None:
        """Multiplies this consumer's part of each tile and stores it."""
        rows, columns = self.tiling.warpgroup_tile
        below = consumer * rows if self.tiling.wg_dimension == "m" else 0
        right = consumer * columns if self.tiling.wg_dimension == "n" else 0
        strips = strips.at[consumer]

        def visit(turn, batch, row, across):
            @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((rows, columns), jnp.float32))
            def _(accumulator):
                self.multiply(accumulator, turn, pl.ds(below, rows), pl.ds(right, columns), stages)
                product = accumulator[...]
                plgpu.barrier_arrive(stages[3].at[self.slot(turn, self.steps - 1)])

                def store(q, column):
                    plane = outs[q].at[self.out_plane(indices, batch)]
                    self.store(product, plane, row + below, column + right, strips)

                self.on_result(across, store)

        self.walk(visit)
        plgpu.wait_smem_to_gmem(0)

    def out_plane(self, indices, batch) -> Any:
        """The plane of each result that a batch's tiles are stored in."""
        return batch * self.planes_per_batch + indices[self.out_index]

    def multiply(self, accumulator, turn, x_part, w_part, stages, steps=None) -> None:
        """Sums over the steps of a tile, or a range of them; lets go of all stages but the last."""
        start, stop = steps or (0, self.steps)
        x_slices, w_slices, filled, consumed = stages
        x_axis, w_axis = self.xs[0].contracted, self.ws[0][0].contracted

        @pl.loop(start, stop)
        def _(step):
            slot = self.slot(turn, step)
            plgpu.barrier_wait(filled.at[slot])
            if x_axis == 2:
                x = x_slices.at[slot, x_part, :]
            else:
                x = x_slices.at[slot].at[:, x_part].transpose((1, 0))
            if w_axis == 1:
                w = w_slices.at[slot].at[:, w_part]
            else:
                w = w_slices.at[slot].at[w_part, :].transpose((1, 0))
            _fence()
            plgpu.wgmma(accumulator, x, w)
            # The multiply before this one is done then, and its stage free.
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(consumed.at[self.slot(turn, step - 1)])

    def store(self, product, plane, row, column, strips) -> None:
        """Rounds the product and sends it off strip by strip."""
        width = self.tiling.epilogue_tile_n
        for i in range(self.tiling.epilogue_tiles_per_warpgroup):
            strip = strips.at[i % self.tiling.epilogue_stages]
            value = product[:, i * width : (i + 1) * width]
            self.await_strip(i)
            strip[...] = value.astype(strip.dtype)
            plgpu.commit_smem()
            self.store_strip(strip, plane, row, column + i * width)

    def await_strip(self, number: int) -> None:
        """Waits until the memory of a part's strip is free: the first may follow on any of them."""
        plgpu.wait_smem_to_gmem(min(number, self.tiling.epilogue_stages - 1), wait_read_only=True)

    def store_strip(self, strip, plane, row, column) -> None:
        """Starts to copy a strip to where it belongs; what lies beyond the end is left out."""
        rows, width = strip.shape

        def copy():
            place = pl.ds(row, rows), pl.ds(column, width)
            plgpu.copy_smem_to_gmem(strip, plane.at[place], commit_group=False)

        if plane.shape[-1] > width:
            copy()
        else:
            # The copy engine does not see the columns of a result of one strip as a dimension of
            # its own, so it would not stop at their end.
            pl.when(column == 0)(copy)
        plgpu.commit_smem_to_gmem_group()

    def first_step(self, turn: Any) -> Any:
        """How many steps this block takes before those of a tile."""
        return turn * self.steps

    def slot(self, turn: Any, step: Any) -> Any:
        """The stage of a step."""
        return lax.rem(self.first_step(turn) + step, self.tiling.max_concurrent_steps)


def block_index_and_count() -> tuple[Any, int]:
    """Returns the index of this block, and the number of blocks of the kernel."""
    index, count = 0, 1
    for axis in ("cluster", *BLOCK_AXES):
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
        count *= lax.axis_size(axis)
    return index, count


@plgpu.inline_mgpu()
def _fence(_) -> None:
    """Orders the accumulator's registers before a multiply.

    Otherwise ptxas does so itself; and where it does not see that all lanes come there together, it
    has each multiply wait for the one before.
    """
    nvvm.wgmma_fence_aligned()
