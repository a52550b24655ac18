"""One kernel that gathers the shards of x while it multiplies those that are here.

``ys[q] = all_gather(x) @ ws[q]``

A ring pays for every chunk: a launch, a rendezvous of the hosts, a last wave of tiles that does not
fill the GPU. This is one launch of the persistent matmul of `matmul_kernel`. Of the warpgroup that
copies in every block, one warp is the producer and another the sender: a warpgroup of its own would
leave the accumulators too few registers. Peers' memory is addressed directly.

The algorithm, on device d of D:

1. The senders copy the device's own shard into the gathered arrays of its peers, in messages, and
   count at each peer what has arrived there. Peers get the shard in the order in which they need
   it (`gather_sender`).
2. The tiles of the results are walked chunk by chunk, from chunk d on, in the order of the rows in
   which all senders send. There is no boundary between chunks: one walk over all tiles.
3. Many rows are multiplied at once, all from their first column on. So of each such group of rows
   one slab of columns is sent after the other, and a producer waits, before it copies from a slab
   of another device's rows, until all messages of it have been counted. If whole rows were sent
   one after the other, tiles of the last would wait for all of a group. Chunk d a producer reads
   from x itself.

Where a tile is as high as several chunks, rows of all of them share tiles: the chunks *join*. Then
the device sends its shard to itself too, so that a tile lies in one array, and all in one pass.

Nothing but its senders waits when a device starts. When a peer has come, its buffers are free and
the semaphores, which every launch gets anew, zero. No kernel ends before all messages to it have
been counted, for each tile waits for its rows. Nothing else is ever written to another device, but
what is said in a meeting, in memory that stays. Every message is sent by a block that is resident:
there are as many blocks as fit at once, and clusters of two, which fit everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.backends.fused.all_gather_config import AllGatherConfig
from collective_matmul.backends.fused.all_gather_sender import Sender, boxes_of, semaphore_of
from collective_matmul.mosaic_gpu.matmul_kernel import Work, block_index_and_count
from collective_matmul.mosaic_gpu.operands import Operand, reader
from collective_matmul.mosaic_gpu.rendezvous import Rendezvous
from collective_matmul.mosaic_gpu.tiling import ITEMSIZE

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# Of its weights, that a block has copied into the L2 cache while it waits for its first rows: all
# blocks together, about half of what the cache holds.
_PREFETCHED_BYTES = 196_608


class Gathering(Work):
    """The kernel's body. Batches of tiles are planes of the results, by the order of arrival."""

    # Sending takes more than producing alone.
    copying_registers = 56
    multiplying_registers = 224

    def __init__(self, config: AllGatherConfig, keep: bool, delays: bool, gathered, ws, outs):
        matmul = config.problem.matmul(config.tiles_span_shards)
        x = Operand(gathered, 2, per_batch=1)
        weights = [Operand(w, matmul.w_contracted_axis) for w in ws]
        super().__init__([x], [weights], outs, matmul.batch, 1, config.tiling)
        self.config = config
        self.devices = config.problem.devices
        self.keep = keep
        self.delays = delays
        # Found in `run`.
        self.rendezvous: Any = None

    def run(self, words, shard, *refs) -> None:
        """What every warpgroup of every block runs; words: see `workspace_pointers`."""
        ws, outs, gathered = refs[: self.results], refs[self.results : -1], refs[-1]
        config = self.config
        count = config.problem.planes * self.devices * config.groups * config.slabs
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        self.rendezvous = Rendezvous(
            words, self.devices, block_index_and_count(), (gathered, arrived)
        )
        xs = (shard, gathered, arrived)
        # Every operand has one plane, or its planes are found without an index.
        indices = [0] * (len(self.ws[0]) + 2)

        @functools.partial(pl.run_scoped, **self.scratch(shard.dtype), collective_axes="warpgroup")
        def _(**scratch):
            self.play(indices, xs, [ws], outs, scratch)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """What the warpgroups of a block share, by name."""
        return super().scratch(dtype) | {
            "boxes": plgpu.SMEM((self.config.buffers, *self.config.box), dtype),
            "loaded": plgpu.Barrier(
                num_arrivals=self.config.pieces, num_barriers=self.config.buffers
            ),
        }

    def copy(self, operands, stages, scratch: dict[str, Any]) -> None:
        """What the warpgroup that copies does: one warp fills the stages, another sends."""

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                self.produce(operands, stages)

            @pl.when(warp == 1)
            def _():
                shard, gathered, arrived = operands[1]
                sender = Sender(self.config, self.keep, self.delays, self.rendezvous)
                sender.send(shard, gathered, arrived, scratch["boxes"], scratch["loaded"])

    def out_plane(self, indices, batch) -> Any:
        """The plane of each result that a batch's tiles are stored in."""
        del indices
        return batch if self.config.tiles_span_shards else self.plane(batch)

    def plane(self, batch) -> Any:
        """The plane of a batch of tiles whose shards do not join: this device's own come first."""
        planes = self.config.problem.planes
        chunk = lax.rem(self.rendezvous.axis_index + lax.div(batch, planes), self.devices)
        return lax.rem(batch, planes) * self.devices + chunk

    def load_tile(self, operands, stages, turn, batch, row, across) -> None:
        """Copies all slices that a tile is the product of, once its rows have arrived."""
        indices, (shard, gathered, arrived), ws = operands
        load = super().load_tile

        def load_from(x, plane, in_parts=None):
            load((indices, [x], ws), stages, turn, plane, row, across, in_parts)

        if self.config.tiles_span_shards:
            pl.when(turn == 0)(functools.partial(self.prefetch, ws, across))
            shards = batch * self.devices
            load_from(gathered, batch, functools.partial(self.load_slabs, arrived, shards, row))
            return
        own_planes = self.config.problem.planes

        @pl.when(batch < own_planes)
        def _():
            load_from(shard, batch)

        @pl.when(batch >= own_planes)
        def _():
            plane = self.plane(batch)
            load_from(gathered, plane, functools.partial(self.load_slabs, arrived, plane, row))

    def load_slabs(self, arrived, plane, row, load, steps: int) -> None:
        """Copies the slices of a tile, slab by slab, each once it has arrived."""
        per_slab = steps // self.config.slabs

        @pl.loop(0, self.config.slabs)
        def _(slab):
            self.await_slab(arrived, plane, row, slab)
            load(slab * per_slab, (slab + 1) * per_slab)

    def prefetch(self, ws, across) -> None:
        """Has the weights of a tile copied into the cache, as far as there is place for all."""
        tiling = self.tiling
        slice_bytes = ITEMSIZE * tiling.tile_k * tiling.tile_n

        def prefetch_slices(q, column):
            w = self.ws[0][q]
            read = reader(ws[0][q], w, [0] * (w.index + 1), 0, pl.ds(column, tiling.tile_n))

            @pl.loop(0, min(self.steps, _PREFETCHED_BYTES // slice_bytes))
            def _(step):
                along = pl.ds(step * tiling.tile_k, tiling.tile_k)
                plgpu.async_prefetch(read(0, along))

        self.on_result(across, prefetch_slices)

    def await_slab(self, arrived, plane, row, slab) -> None:
        """Waits for a slab of a tile's rows, counted from the beginning of a plane of one shard."""
        config = self.config
        rows = config.problem.m
        end = rows * (self.devices if config.tiles_span_shards else 1)

        def group(row):
            within = lax.div(lax.rem(row, rows), config.rows_per_group)
            return lax.div(row, rows) * config.groups + within

        last_row = jnp.minimum(row + self.tiling.tile_m, end) - 1

        @pl.loop(group(row), group(last_row) + 1)
        def _(number):
            semaphore = arrived.at[semaphore_of(config, plane, number, slab)]
            boxes = boxes_of(config, lax.rem(number, config.groups))
            count = lax.div(boxes, config.boxes_per_message)
            pl.semaphore_wait(semaphore, count, decrement=False)
