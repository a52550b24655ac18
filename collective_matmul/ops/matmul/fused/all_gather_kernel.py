"""The fused all-gather and matmul: one kernel multiplies the shards of x while it gathers them.

``ys[q] = all_gather(x) @ ws[q]``

A ring pays for every chunk: a launch, a rendezvous of the hosts, a last wave of tiles that does not
fill the GPU. This is one launch of the persistent GEMM of `matmul_kernel`. In the load warpgroup of
every block, one warp is the producer and another one the sender. (A sender warpgroup of its own
would leave the accumulators too few registers.) Stores go directly to the memory of peers.

The algorithm, on device d of D:

1. The senders store the device's own shard in the `gathered` arrays of its peers, in messages, and
   count in the peers' semaphores what has arrived there. Peers get the shard in the order in which
   they need it (see `all_gather_sender`).
2. All blocks visit the tiles of the results chunk by chunk, from chunk d on, which is the device's
   own shard and read from x itself. Within a chunk, rows are visited in the order in which all
   senders send them. It is one sequence of tiles, without a barrier between chunks.
3. Many rows are multiplied at the same time, all from their first column on. So the rows of a shard
   are sent in groups, and a group slab by slab, each slab a range of columns. Before the producer
   loads from a slab of a peer's rows, it waits until all messages of the slab have been counted.
   (If whole rows were sent one after the other, tiles of the last rows would wait for all of the
   group.)

If a tile is as high as several chunks, tiles span shards (`tiles_span_shards`). Then the device
stores its own shard in its own `gathered` array too, so that a tile's rows are in one array, and
all devices get every message in the same pass.

Invariants:

- Only senders wait for the rendezvous. After it, the peers' arrays are free, and their semaphores
  are zero, since every launch gets new ones.
- No kernel ends before all messages to its device have been counted: each message is part of a
  slab that some tile's producer waits for.
- No deadlock: every message is sent by a resident block, and a sender waits only for the
  rendezvous and its own copies. All blocks are resident, because there is one for each
  multiprocessor, in clusters of at most two, which fit everywhere.
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

from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand, reader
from collective_matmul.mosaic_gpu.hopper_matmul.row_scales import FLOAT32_BYTES, load_from_rows
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import ScaledMultiplication
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import block_index_and_count
from collective_matmul.mosaic_gpu.kernel_types import (
    Operands,
    Ref,
    Scalar,
    Stages,
    TileCoord,
    TilePart,
)
from collective_matmul.mosaic_gpu.peers.peer_memory import WARP
from collective_matmul.mosaic_gpu.peers.rendezvous import Rendezvous
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig
from collective_matmul.ops.matmul.fused.all_gather_sender import Sender, boxes_in, semaphore_index

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

# Bytes of its weights that a block prefetches to the L2 cache while it waits for its first rows.
# All blocks together prefetch about half of what the cache holds.
_PREFETCHED_BYTES = 196_608


class GatheredOperand(NamedTuple):
    """References to all rows of x.

    Attributes:
      shard: this device's rows, [planes, m, k].
      gathered: the rows of all devices, which peers store to: [planes * D, m, k], or
        [planes, D * m, k] if tiles span shards.
      arrived: semaphores that count the messages of each slab in `gathered`.
    """

    shard: Ref
    gathered: Ref
    arrived: Ref


class AllGatherGemm(PersistentGemm):
    """The body of the kernel. The batches of the GEMM are the planes of the results.

    Unless tiles span shards, each plane of each shard is a batch, in the order in which the shards
    arrive.
    """

    # Sending takes more registers than loading alone.
    load_registers = 56
    mma_registers = 224

    def __init__(
        self,
        config: AllGatherConfig,
        keep_gathered: bool,
        race_delays: bool,
        gathered: Any,
        ws: Sequence[Any],
        outs: Sequence[Any],
    ):
        """Describes the kernel.

        Args:
          config: how it runs.
          keep_gathered: whether `gathered` is a result, and must be complete.
          race_delays: whether senders wait for random times. For tests.
          gathered: an array of the shape of x gathered.
          ws: the weights.
          outs: the results.
        """
        matmul = config.matmul
        x = Operand(gathered, 2, per_batch=1)
        weights = [Operand(w, matmul.w_contracted_axis) for w in ws]
        super().__init__([x], [weights], outs, matmul.batch, 1, config.tiling)
        self.config = config
        self.devices = config.problem.devices
        self.keep_gathered = keep_gathered
        self.race_delays = race_delays
        # Set in `run`. What is sent is the shard, maybe in another shape.
        self.rendezvous: Any = None
        self.x: Any = None
        self.sent: Ref = None

    def run(self, workspace_pointers: Ref, shard: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are the weights, the results, and the gathered x."""
        ws, outs, gathered = refs[: self.results], refs[self.results : -1], refs[-1]
        config = self.config
        count = config.problem.planes * self.devices * config.groups * config.slabs
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        block, arrays = block_index_and_count(), (gathered, arrived)
        self.rendezvous = Rendezvous(
            workspace_pointers, self.devices, block, arrays, "all_gather_matmul"
        )
        # The weights have one plane, and planes of x are found from the batch alone.
        indices = [0] * (len(self.ws[0]) + 2)
        self.x = GatheredOperand(shard, gathered, arrived)
        self.sent = shard if self.sent is None else self.sent
        operands = Operands(indices, self.x, [list(ws)])

        @functools.partial(pl.run_scoped, **self.scratch(), collective_axes="warpgroup")
        def _(**scratch: Ref) -> None:
            self.run_warpgroup(operands, outs, scratch)

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory and the barriers of a block, by name."""
        return super().scratch() | {
            "boxes": plgpu.SMEM((self.config.buffers, *self.config.box), self.dtypes[0]),
            "loaded": plgpu.Barrier(
                num_arrivals=self.config.pieces, num_barriers=self.config.buffers
            ),
        }

    def run_load_warpgroup(
        self, operands: Operands, stages: Stages, scratch: dict[str, Any]
    ) -> None:
        """Executes the load warpgroup: warp 0 loads the k-blocks, and warp 1 sends the shard."""

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                self.load_tiles(operands, stages)

            @pl.when(warp == 1)
            def _() -> None:
                _, gathered, arrived = operands.xs
                sender = Sender(self.config, self.keep_gathered, self.race_delays, self.rendezvous)
                boxes, loaded = scratch["boxes"], scratch["loaded"]
                sender.send(self.sent, self.places(gathered), arrived, boxes, loaded)

    def places(self, gathered: Ref) -> Ref:
        """Returns the reference to gathered rows as the sender sees them."""
        return gathered

    def out_plane(self, indices: Ref, batch: Scalar) -> Scalar:
        """Returns the plane of each result that the tiles of a batch are stored in."""
        del indices
        return batch if self.config.tiles_span_shards else self.plane(batch)

    def plane(self, batch: Scalar) -> Scalar:
        """Returns the plane of a batch if tiles do not span shards: own shard first."""
        planes = self.config.problem.planes
        chunk = lax.rem(self.rendezvous.axis_index + lax.div(batch, planes), self.devices)
        return lax.rem(batch, planes) * self.devices + chunk

    def load_tile(
        self, operands: Operands, stages: Stages, tile: TileCoord, in_parts: Any = None
    ) -> None:
        """Loads all k-blocks that a tile is the product of, each after its slab has arrived."""
        del in_parts
        indices, (shard, gathered, arrived), ws = operands
        load_tile = super().load_tile

        def load_from(x: Ref, plane: Scalar, in_parts: Callable | None = None) -> None:
            load_tile(Operands(indices, [x], ws), stages, tile._replace(batch=plane), in_parts)

        if self.config.tiles_span_shards:
            pl.when(tile.tile_idx == 0)(functools.partial(self.prefetch, ws, tile.cluster_n))
            plane = tile.batch * self.devices
            in_parts = functools.partial(self.load_slabs, arrived, plane, tile.row)
            load_from(gathered, tile.batch, in_parts)
            return
        own_planes = self.config.problem.planes

        # The own shard is here from the start.
        @pl.when(tile.batch < own_planes)
        def _() -> None:
            load_from(shard, tile.batch)

        @pl.when(tile.batch >= own_planes)
        def _() -> None:
            plane = self.plane(tile.batch)
            in_parts = functools.partial(self.load_slabs, arrived, plane, tile.row)
            load_from(gathered, plane, in_parts)

    def load_slabs(
        self, arrived: Ref, plane: Scalar, row: Scalar, load: Callable, steps: int
    ) -> None:
        """Loads the k-blocks of a tile slab by slab, each after it has arrived.

        Args:
          arrived: semaphores of the slabs.
          plane: of `gathered`, as if tiles did not span shards.
          row: first row of the tile in that plane.
          load: loads a range of steps.
          steps: pipeline steps of the tile.
        """
        per_slab = steps // self.config.slabs

        @pl.loop(0, self.config.slabs)
        def _(slab: Scalar) -> None:
            self.wait_for_slab(arrived, plane, row, slab)
            load(slab * per_slab, (slab + 1) * per_slab)

    def prefetch(self, ws: list[list[Ref]], cluster_n: Scalar) -> None:
        """Prefetches the weights of a tile to the L2 cache, up to `_PREFETCHED_BYTES`."""
        tiling = self.tiling
        k_block_bytes = self.config.problem.itemsize * tiling.tile_k * tiling.tile_n

        def prefetch_k_blocks(q: int, column: Scalar) -> None:
            w = self.ws[0][q]
            read = reader(ws[0][q], w, [0] * (w.index + 1), 0, pl.ds(column, tiling.tile_n))

            @pl.loop(0, min(self.steps, _PREFETCHED_BYTES // k_block_bytes))
            def _(step: Scalar) -> None:
                k_block = pl.ds(step * tiling.tile_k, tiling.tile_k)
                plgpu.async_prefetch(read(0, k_block))

        self.on_result(cluster_n, prefetch_k_blocks)

    def wait_for_slab(self, arrived: Ref, plane: Scalar, row: Scalar, slab: Scalar) -> None:
        """Waits until a slab of all rows of a tile has arrived. Arguments: see `load_slabs`."""
        config = self.config
        rows = config.problem.m
        end = rows * (self.devices if config.tiles_span_shards else 1)

        def group(row: Scalar) -> Scalar:
            """The group of a row. Groups are counted through all shards that the tile spans."""
            within = lax.div(lax.rem(row, rows), config.rows_per_group)
            return lax.div(row, rows) * config.groups + within

        last_row = jnp.minimum(row + self.tiling.tile_m, end) - 1

        @pl.loop(group(row), group(last_row) + 1)
        def _(number: Scalar) -> None:
            semaphore = arrived.at[semaphore_index(config, plane, number, slab)]
            boxes = boxes_in(config, lax.rem(number, config.groups))
            messages = lax.div(boxes, config.boxes_per_message)
            # Other blocks wait for the same slab, so the semaphore keeps its count.
            self.rendezvous.wait_for_count(semaphore, messages, "messages of x", WARP)


class ScaledAllGatherGemm(ScaledMultiplication, AllGatherGemm):
    """The kernel for operands in 8 bits. It gathers packed rows, with their scales."""

    # The scales of a row arrive with it.
    scales_arrive = True

    def __init__(self, config: AllGatherConfig, *args: Any):
        """Describes the kernel. Arguments: see `AllGatherGemm`."""
        super().__init__(config, *args)
        self.in_blocks = config.problem.scales == "blocks"

    def run(self, workspace_pointers: Ref, w_scales: Ref, lines: Ref, *refs: Ref) -> None:
        """Executes one warpgroup.

        After the scales of the weights and the lines of the shard, refs are those of
        `AllGatherGemm`.
        """
        self.w_scales, self.sent = w_scales, lines
        super().run(workspace_pointers, *refs)

    def places(self, gathered: Ref) -> Ref:
        """Returns the reference to gathered messages as lines."""
        planes, rows, _ = gathered.shape
        config = self.config
        return gathered.reshape(planes, rows * config.lines_per_row, config.sent_columns)

    def read_x_scales(self, tile: TileCoord, part: TilePart, step: Scalar) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0.

        The barrier that the first k-block is here orders this after what the producer has waited
        for: the whole rows.
        """
        column = self.config.problem.k + FLOAT32_BYTES * step
        row, shard, gathered = tile.row + part.row_offset, self.x.shard, self.x.gathered
        if self.config.tiles_span_shards:
            return load_from_rows([gathered], 0, tile.batch, row, column)
        is_own = tile.batch < self.config.problem.planes
        plane = jnp.where(is_own, tile.batch, self.plane(tile.batch))
        return load_from_rows([gathered, shard], jnp.int32(is_own), plane, row, column)
