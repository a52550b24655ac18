"""The fused matmul and reduce-scatter, or all-reduce: one kernel sums products over devices.

``y = reduce_scatter(sum over p of xs[p] @ ws[p])``, or ``all_reduce`` of it

This is one launch of the persistent GEMM of `matmul_kernel`. Stores go directly to the memory of
peers. Each device owns some rows of the sum; `owner_tile_scheduler` says which tiles are remote and
which are local.

The algorithm, on device d of D:

1. Remote tiles come first. The MMA warpgroups round the product of a tile and store it at its
   owner, which has one array of partial products for each peer.
2. They store it epilogue tile by epilogue tile while the first steps of the next tile are
   multiplied (see `reduce_scatter_sender`). When the stores have completed they add one to the
   owner's semaphore of that tile.
3. Local tiles come last. After the k-blocks of a local tile, the load warpgroup waits until all
   peers have signalled the tile, and passes their partial products through the same stages. The
   MMA warpgroups add them to the accumulator in float32, always in the same order, round once and
   store the sum. No separate pass adds anything.

If a tile is higher than what one device owns, it spans owners (`tiles_span_owners`). It is local to
all of them: each sends the other owners' rows of it before it sums its own.

An all-reduce is two-shot or one-shot:

- Two-shot: the same as above, but the sums are stored in the results of all devices.
- One-shot, for few rows: every device owns all rows, and sends its rounded products to all devices,
  also to itself. All add them in the order of device indices, so all get the same bits.

Invariants:

- No device waits at the start. The load warpgroup waits for the rendezvous after the first tile's
  k-blocks, and the MMA warpgroups before they store anything to peers. Then the peers' arrays are
  free, and their semaphores are zero, since every launch gets new ones.
- No kernel ends before all stores to its device have been counted: partial products by the local
  tiles that wait for them; sums of the two-shot all-reduce by block 0, at the end.
- No deadlock: a tile is sent before its sender waits for anybody, and all blocks are resident, one
  for each multiprocessor, in clusters of at most two. Tiles that span owners are sent by devices
  that may wait for earlier ones of them; but all their owners visit these in the same order, with
  the same blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import (
    ScaledMultiplication,
    load_row_scales,
)
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import block_index_and_count
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import CONSUMERS, ITEMSIZE
from collective_matmul.mosaic_gpu.kernel_types import (
    Operands,
    Ref,
    Scalar,
    Stages,
    TileCoord,
    TilePart,
)
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP
from collective_matmul.mosaic_gpu.peers.remote_store import async_remote_store, signal_peers
from collective_matmul.mosaic_gpu.peers.rendezvous import Rendezvous
from collective_matmul.ops.matmul.fused.owner_tile_scheduler import (
    EpilogueTiles,
    OwnerTileScheduler,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_config import ReduceScatterConfig
from collective_matmul.ops.matmul.fused.reduce_scatter_sender import (
    ARRIVED,
    SUMS,
    ConsumerPart,
    ReducedArrays,
    TileSender,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


class GemmReduceScatter(OwnerTileScheduler):
    """The body of the kernel."""

    def __init__(
        self,
        config: ReduceScatterConfig,
        race_delays: bool,
        xs: Sequence[Any],
        ws: Sequence[Any],
        dtype: Any,
    ):
        """Describes the kernel.

        Args:
          config: how it runs.
          race_delays: whether consumers wait for random times before they send. For tests.
          xs: each [planes, all rows, k_p].
          ws: each [1, k_p, n], or transposed.
          dtype: of the result, and of the products that are summed.
        """
        super().__init__(config, xs, ws, dtype)
        self.race_delays = race_delays
        # Set in `run`: the barrier that tells the MMA warpgroups that all peers have entered the
        # launch, and the memory of the x stages seen as epilogue tiles. A partial product is loaded
        # to the first epilogue tile of a stage.
        self.peers_ready: Any = None
        self.incoming = EpilogueTiles(None, None)

    def run(self, workspace_pointers: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are the xs, the ws, the result, and the partial products."""
        terms = len(self.xs)
        xs, ws, (y, partials) = refs[:terms], [[w] for w in refs[terms : 2 * terms]], refs[-2:]
        # The last semaphore counts the warpgroups of peers that have stored all their sums here.
        count = self.config.local_tiles + 1
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        # The weights have one plane, and planes of the xs are found from the batch alone.
        indices = [0] * (2 * terms + 1)
        arrays = ReducedArrays(y, partials, arrived)
        kernel, block = f"matmul_{self.problem.kind}", block_index_and_count()
        self.rendezvous = Rendezvous(
            workspace_pointers, self.problem.devices, block, arrays, kernel
        )

        @functools.partial(pl.run_scoped, **self.scratch(), collective_axes="warpgroup")
        def _(**scratch: Any) -> None:
            scratch["x_stages"], *incoming = scratch["x_stages"]
            self.incoming = EpilogueTiles(*incoming)
            scratch["store_tiles"] = EpilogueTiles(*scratch["store_tiles"])
            self.peers_ready = scratch["peers_ready"]
            self.run_warpgroup(Operands(indices, (xs, arrays), ws), arrays, scratch)

    def shared_memory(self) -> dict[str, Any]:
        """Returns that of a GEMM; stages and store tiles also have a raw view."""
        memory, tiling, dtype = super().shared_memory(), self.tiling, self.dtypes[2]
        epilogue_tile = tiling.tile_m, tiling.epilogue_tile_n
        stage_columns = tiling.tile_k * jnp.dtype(self.dtypes[0]).itemsize // ITEMSIZE
        per_stage = stage_columns // tiling.epilogue_tile_n
        incoming = tiling.max_concurrent_steps, per_stage, *epilogue_tile
        x_stages, store_tiles = memory["x_stages"], memory["store_tiles"]

        def raw(shape: tuple[int, ...]) -> Any:
            return plgpu.SMEM(shape, dtype)

        swizzled = plgpu.SMEM(incoming, dtype, transforms=store_tiles.transforms)
        return memory | {
            "x_stages": plgpu.RefUnion(x_stages, swizzled, raw(incoming)),
            "store_tiles": plgpu.RefUnion(store_tiles, raw(store_tiles.shape)),
        }

    def barriers(self) -> dict[str, Any]:
        """Returns those of a GEMM, and the one that tells consumers that peers are ready."""
        return super().barriers() | {"peers_ready": plgpu.Barrier()}

    @property
    def epilogue_swizzle(self) -> int:
        """Bytes over which epilogue tiles are swizzled: as stages, which raw ones are loaded to."""
        return self.tiling.swizzle

    # The load warpgroup.

    def load_tiles(self, operands: Operands, stages: Stages) -> None:
        """Loads the k-blocks and the partial products of all tiles."""
        self.rendezvous.publish()
        super().load_tiles(operands, stages)
        if self.problem.kind == "two_shot":
            _, arrays = operands.xs

            # The kernel must not end before the sums of all peers are here: one block waits.
            @pl.when(block_index_and_count()[0] == 0)
            def _() -> None:
                count = (self.problem.devices - 1) * self.blocks_with_tiles() * CONSUMERS
                semaphore = arrays.arrived.at[self.config.local_tiles]
                self.rendezvous.wait_for_count(semaphore, count, "sums of peers")

    def load_tile(
        self, operands: Operands, stages: Stages, tile: TileCoord, in_parts: Any = None
    ) -> None:
        """Loads all k-blocks that a tile is the product of, and the partial products of peers."""
        indices, (xs, arrays), ws = operands
        super().load_tile(Operands(indices, xs, ws), stages, tile, in_parts)

        # The k-blocks of the first tile are on their way: only now it is time to wait.
        @pl.when(tile.tile_idx == 0)
        def _() -> None:
            self.rendezvous.wait_for_peers()
            plgpu.barrier_arrive(self.peers_ready)

        @pl.when(tile.tile_idx >= self.remote_tiles_of_block())
        def _() -> None:
            self.load_partials(arrays, stages, tile)

    def load_partials(self, arrays: ReducedArrays, stages: Stages, tile: TileCoord) -> None:
        """Loads the partial products of a local tile, in the order in which they are added.

        That is the order of `add_partials`: by epilogue tile, then by source, then by consumer if
        the consumers divide the columns.
        """
        config, tiling = self.config, self.tiling
        width = tiling.epilogue_tile_n
        axis_index = self.rendezvous.axis_index
        # Maybe only one block of a cluster has rows of this device. But all its blocks go through
        # the same steps: their `empty` barriers count arrivals of the whole cluster.
        has_rows = self.owns(axis_index, tile.row)
        first = self.first_row(axis_index)

        @pl.when(has_rows)
        def _() -> None:
            semaphore = arrays.arrived.at[self.local_tile_index(axis_index, tile)]
            count = config.sources * CONSUMERS
            self.rendezvous.wait_for_count(semaphore, count, "partial products of peers")

        @pl.loop(0, config.partial_steps)
        def _(step: Scalar) -> None:
            stage = self.stage(tile.tile_idx, self.steps + step)
            number = self.first_step(tile.tile_idx) + self.steps + step

            @pl.when(number >= tiling.max_concurrent_steps)
            def _() -> None:
                plgpu.barrier_wait(stages.empty.at[stage])

            half = lax.rem(step, config.halves)
            source = lax.rem(lax.div(step, config.halves), config.sources)
            epilogue_tile = lax.div(step, config.halves * config.sources)
            column = self.first_column(tile) + half * tiling.warpgroup_tile[1]
            column += epilogue_tile * width
            plane = source * config.problem.planes + tile.batch
            partial = arrays.partials.at[plane, lax.div(column, width)]

            @pl.when(has_rows)
            def _() -> None:
                rows, to = tiling.tile_m, self.incoming.raw.at[stage, 0]
                if self.problem.m < rows:
                    # The other rows of the stage keep old values, of which no sums are stored.
                    rows = self.problem.m
                    to = to.at[pl.ds(first - tile.row, rows)]
                start = jnp.maximum(tile.row - first, 0)
                plgpu.copy_gmem_to_smem(partial.at[pl.ds(start, rows)], to, stages.full.at[stage])

            @pl.when(jnp.logical_not(has_rows))
            def _() -> None:
                plgpu.barrier_arrive(stages.full.at[stage])

            # The second arrival, in place of that of a k-block of w.
            plgpu.barrier_arrive(stages.full.at[stage])

    # The MMA warpgroups.

    def run_mma_warpgroup(
        self,
        indices: Ref,
        consumer: Scalar,
        stages: Stages,
        store_tiles: EpilogueTiles,
        outs: ReducedArrays,
    ) -> None:
        """Executes one MMA warpgroup: multiplies its part of each tile, and sends or sums it."""
        del indices
        config, tile_part = self.config, self.part_of(consumer)
        part = ConsumerPart(consumer, *tile_part, store_tiles.select(consumer), outs)
        sender = TileSender(self, part, self.race_delays)

        def visit(tile: TileCoord) -> None:
            send_previous_tile = functools.partial(sender.send_previous_tile, tile.tile_idx)
            product = self.multiply(tile, tile_part, stages, in_parts=send_previous_tile)
            # Nothing is sent before this: the first tile sends nothing while it is multiplied.
            pl.when(tile.tile_idx == 0)(functools.partial(plgpu.barrier_wait, self.peers_ready))
            is_local = tile.tile_idx >= self.remote_tiles_of_block()

            @pl.when(jnp.logical_not(is_local) | config.tiles_span_owners)
            def _() -> None:
                self.round_product(product, part)

            @pl.when(is_local)
            def _() -> None:
                if config.tiles_span_owners:
                    # Before any wait for peers' partial products: theirs may wait for this.
                    sender.send_tile(tile)
                self.add_partials(product, part, tile, stages)

        self.for_each_tile(visit)
        # The last tile has no next one during which it would be sent.
        sender.on_remote_tile(self.tiles_of_block() - 1, sender.send_tile)
        plgpu.wait_smem_to_gmem(0)
        if self.problem.kind == "two_shot":

            @pl.when(self.tiles_of_block() > 0)
            def _() -> None:
                peers = [self.rendezvous.peer_buffer(ARRIVED, o) for o in self.receivers]
                signal_peers(part.arrays.arrived.at[config.local_tiles], peers, WARPGROUP)

    def round_product(self, product: jax.Array, part: ConsumerPart) -> None:
        """Rounds a part's product to the store tiles, which it is sent from later."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number in range(self.tiling.epilogue_tiles_per_warpgroup):
            self.fill_store_tile(part.store_tiles.select(number), product, number)
        plgpu.commit_smem()

    def fill_store_tile(self, store_tile: EpilogueTiles, value: jax.Array, number: int) -> None:
        """Rounds the columns of one epilogue tile, by its number, of a value to a store tile."""
        width = self.tiling.epilogue_tile_n
        rounded = value[:, number * width : (number + 1) * width]
        store_tile.swizzled[...] = rounded.astype(store_tile.swizzled.dtype)

    # Summing local tiles.

    def add_partials(
        self, product: jax.Array, part: ConsumerPart, tile: TileCoord, stages: Stages
    ) -> None:
        """Adds the partial products of peers to a local tile's part, and stores the sum.

        The order of the terms does not depend on timing: the result has the same bits every time.
        """
        config, width = self.config, self.tiling.epilogue_tile_n
        rows = pl.ds(part.row_offset, self.tiling.warpgroup_tile[0])

        for number in range(config.tiling.epilogue_tiles_per_warpgroup):
            value = product[:, number * width : (number + 1) * width]
            for source in range(config.sources):
                # A step for each half of the columns; both consumers wait for and free both.
                step = self.steps + (number * config.sources + source) * config.halves
                halves = [self.stage(tile.tile_idx, step + half) for half in range(config.halves)]
                for stage in halves:
                    plgpu.barrier_wait(stages.full.at[stage])
                own_half = part.consumer if config.halves > 1 else 0
                own_stage = self.stage(tile.tile_idx, step + own_half)
                partial = self.incoming.swizzled[own_stage, 0, rows, :].astype(jnp.float32)
                # In the one-shot all-reduce, this device's product is among the partial ones.
                starts_sum = self.problem.kind == "one_shot" and source == 0
                value = partial if starts_sum else value + partial
                # The next TMA copy to this stage must not overtake the reads of this warpgroup.
                plgpu.commit_smem()
                for stage in halves:
                    plgpu.barrier_arrive(stages.empty.at[stage])
            store_tile = part.store_tiles.select(number)
            self.wait_for_store_tile(number)
            self.fill_store_tile(store_tile, value, 0)
            plgpu.commit_smem()
            column = self.first_column(tile) + part.column_offset + number * width
            self.store_sum(store_tile, part, tile, column)

    def store_sum(
        self, store_tile: EpilogueTiles, part: ConsumerPart, tile: TileCoord, column: Scalar
    ) -> None:
        """Starts to store an epilogue tile of sums: in y, or in y of all devices for "two_shot"."""
        y, row = part.arrays.y, tile.row + part.row_offset
        if self.problem.kind == "two_shot":
            axis_index = self.rendezvous.axis_index
            plane = y.at[tile.batch * self.problem.devices + axis_index]
            for offset in (0, *self.receivers):
                peer_buffer = self.rendezvous.peer_buffer(SUMS, offset)
                regions = self.regions_for(store_tile, plane, axis_index, row, column)
                for region, place, has_it in regions:
                    async_remote_store(region, place, peer_buffer, has_it, scope=WARPGROUP)
        else:
            plane = y.at[tile.batch]
            for region, place, has_it in self.local_regions(
                store_tile.swizzled, plane, row, column
            ):
                plgpu.copy_smem_to_gmem(region, place, has_it, commit_group=False)
        plgpu.commit_smem_to_gmem_group()


class ScaledGemmReduceScatter(ScaledMultiplication, GemmReduceScatter):
    """The kernel for operands in 8 bits: packed rows, all of which are there from the start.

    Products are scaled before they are rounded, so they are sent and summed as in half precision.
    """

    def __init__(self, config: ReduceScatterConfig, *args: Any, first_scale: int):
        """Describes the kernel. Arguments: see `GemmReduceScatter` and `ScaledGemm`."""
        super().__init__(config, *args)
        self.in_blocks, self.first_scale = config.problem.scales == "blocks", first_scale
        # Set in `run`.
        self.x_scales: Ref = None

    def run(self, workspace_pointers: Ref, x_scales: Ref, w_scales: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; after the scales, refs are those of `GemmReduceScatter`."""
        self.x_scales, self.w_scales = x_scales, w_scales
        super().run(workspace_pointers, *refs)

    def read_x_scales(self, tile: TileCoord, part: TilePart, step: Scalar) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0."""
        row = tile.row + part.row_offset
        return load_row_scales(self.x_scales, tile.batch, row, self.first_scale + step)
