"""The load warpgroup of the persistent GEMM: which k-blocks of which operands each tile needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand, reader
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import TileScheduler
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE, Tiling
from collective_matmul.mosaic_gpu.kernel_types import (
    KBlockLoad,
    Operands,
    PipelineStep,
    Ref,
    Scalar,
    Stages,
    TileCoord,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


class Load(NamedTuple):
    """A copy of the load warpgroup in each pipeline step, by TMA.

    Attributes:
      read: ``read(plane, k_range)`` returns the reference to copy from, see `operands.reader`.
      stages: shared memory to copy to, one entry for each stage.
      axis: the axis of the cluster whose blocks have it in common, or None.
    """

    read: Callable[[Scalar, Any], Ref]
    stages: Ref
    axis: str | None = None

    def start(self, plane: Scalar, k_block: Any, step: PipelineStep, full: Ref) -> None:
        """Starts the copy of a step; see `KBlockLoad`."""
        source, stage = self.read(plane, k_block), step.stage
        to = self.stages.at[stage]
        plgpu.copy_gmem_to_smem(source, to, full.at[stage], collective_axes=self.axis)


class TileLoader(TileScheduler):
    """Loads the k-blocks of the tiles of a block into a ring of stages.

    Attributes:
      xs: the operands x_p. In the kernel, an operand's indices are their places in `indices`, see
        `matmul`.
      ws: the operands of each x_p, one for each result.
    """

    def __init__(
        self,
        xs: Sequence[Operand],
        ws: Sequence[Sequence[Operand]],
        tiling: Tiling,
        batch: int,
        m: int,
        n: Sequence[int],
        contracted_planes: int,
    ):
        """Describes the operands, and the tiles of results as `TileScheduler` does."""
        # Not of the xs, at the ends of whose rows there may be scales.
        self.plane_steps = [pl.cdiv(w.size(w.contracted), tiling.tile_k) for w, *_ in ws]
        super().__init__(tiling, batch, m, n, contracted_planes * sum(self.plane_steps))
        count, numbers = len(xs) * (1 + len(n)), itertools.count()

        def placed(operand: Operand) -> Operand:
            index = next(numbers)
            return operand._replace(array=None, index=index, column_block=count + 1 + index)

        self.xs = [placed(x) for x in xs]
        self.ws = [[placed(w) for w in term] for term in ws]
        self.contracted_planes = contracted_planes
        # Rows of x beyond its end are not loaded: TMA takes longer for rows out of bounds. Blocks
        # that multicast x load equal parts of it, each of whole swizzles.
        self.x_rows = tiling.tile_m
        if xs[0].free == 1:
            multiple, rows = ROW_MULTIPLE * tiling.cluster[1], xs[0].array.shape[1]
            self.x_rows = min(tiling.tile_m, pl.cdiv(rows, multiple) * multiple)

    def load_tiles(self, operands: Operands, stages: Stages) -> None:
        """Loads the k-blocks of all tiles, each as soon as its stage is empty."""
        self.for_each_tile(functools.partial(self.load_tile, operands, stages))
        self.wait_until_empty(self.first_step(self.tiles_of_block()), stages)

    def wait_until_empty(self, steps: Scalar, stages: Stages) -> None:
        """Waits until all stages are empty again, after all `steps` of this block."""

        # Other blocks of the cluster signal this block's `empty` barriers, in its shared memory. So
        # it must not exit before the last of these signals has come.
        @pl.loop(0, jnp.minimum(steps, self.tiling.max_concurrent_steps))
        def _(stage: Scalar) -> None:
            plgpu.barrier_wait(stages.empty.at[stage])

    def load_tile(
        self,
        operands: Operands,
        stages: Stages,
        tile: TileCoord,
        in_parts: Callable[[Callable, int], None] | None = None,
    ) -> None:
        """Loads all k-blocks that a tile is the product of.

        Args:
          operands: to load from.
          stages: to load to.
          tile: the tile.
          in_parts: called as ``in_parts(load, steps)`` instead of ``load(0, steps)``: it calls
            ``load(start, stop)`` for consecutive ranges of the steps.
        """
        indices, xs, ws = operands
        columns = self.tiling.tile_n
        x_stages = stages.x
        if self.x_rows < self.tiling.tile_m:
            x_stages = x_stages.at[:, pl.ds(0, self.x_rows)]
        # Each block loads a part of what is multicast, and receives all of it.
        w_axis, _ = self.multicast_axes

        def load_terms(q: int, column: Scalar) -> None:
            first = self.first_step(tile.tile_idx)
            for p, steps in enumerate(self.plane_steps):
                x, w = self.xs[p], self.ws[p][q]
                load_x = self.load_of_x(xs[p], x, indices, tile, x_stages)
                read_w = reader(ws[p][q], w, indices, tile.batch, pl.ds(column, columns))
                loads = [load_x, Load(read_w, stages.w, w_axis)]
                load = functools.partial(self.load_k_blocks, first, steps, loads, stages)
                count = self.contracted_planes * steps
                load(0, count) if in_parts is None else in_parts(load, count)
                first += count

        self.on_result(tile.cluster_n, load_terms)

    def load_of_x(
        self, x_ref: Ref, x: Operand, indices: Ref, tile: TileCoord, x_stages: Ref
    ) -> KBlockLoad:
        """Returns what loads the k-blocks of x for a tile."""
        read = reader(x_ref, x, indices, tile.batch, pl.ds(tile.row, self.x_rows))
        return Load(read, x_stages, self.multicast_axes[1])

    def load_k_blocks(
        self,
        first: Scalar,
        steps_per_plane: int,
        loads: Sequence[KBlockLoad],
        stages: Stages,
        start: Scalar,
        stop: Scalar,
    ) -> None:
        """Loads the k-blocks of one term in a range of its steps.

        Args:
          first: the step, of the block, at which the term begins.
          steps_per_plane: steps of one contracted plane.
          loads: what each step loads.
          stages: to load to.
          start: first step of the range, within the term.
          stop: its end.
        """
        tiling = self.tiling

        @pl.loop(start, stop)
        def _(step: Scalar) -> None:
            number = first + step
            stage = lax.rem(number, tiling.max_concurrent_steps)

            # The first time round the ring, all stages are empty.
            @pl.when(number >= tiling.max_concurrent_steps)
            def _() -> None:
                plgpu.barrier_wait(stages.empty.at[stage])

            plane, within = 0, step
            if self.contracted_planes > 1:
                plane, within = lax.div(step, steps_per_plane), lax.rem(step, steps_per_plane)
            k_block = pl.ds(within * tiling.tile_k, tiling.tile_k)
            for load in loads:
                load.start(plane, k_block, PipelineStep(number, stage), stages.full)
