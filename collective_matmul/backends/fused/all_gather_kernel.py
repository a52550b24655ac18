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

from collective_matmul.backends.fused.all_gather_config import Plan
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

    def __init__(self, plan: Plan, keep: bool, delays: bool, gathered, ws, outs):
        problem = plan.shapes.problem(plan.joins)
        x = Operand(gathered, 2, per_batch=1)
        weights = [Operand(w, problem.w_contracted) for w in ws]
        super().__init__([x], [weights], outs, problem.batch, 1, plan.tiles)
        self.plan = plan
        self.devices = plan.shapes.devices
        self.keep = keep
        self.delays = delays
        # Found in `run`.
        self.rendezvous: Any = None

    def run(self, words, shard, *refs) -> None:
        """What every warpgroup of every block runs; words: see `workspace_pointers`."""
        ws, outs, gathered = refs[: self.results], refs[self.results : -1], refs[-1]
        plan = self.plan
        count = plan.shapes.planes * self.devices * plan.groups * plan.slabs
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
            "boxes": plgpu.SMEM((self.plan.buffers, *self.plan.box), dtype),
            "loaded": plgpu.Barrier(num_arrivals=self.plan.pieces, num_barriers=self.plan.buffers),
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
                sender = Sender(self.plan, self.keep, self.delays, self.rendezvous)
                sender.send(shard, gathered, arrived, scratch["boxes"], scratch["loaded"])

    def out_plane(self, indices, batch) -> Any:
        """The plane of each result that a batch's tiles are stored in."""
        del indices
        return batch if self.plan.joins else self.plane(batch)

    def plane(self, batch) -> Any:
        """The plane of a batch of tiles whose shards do not join: this device's own come first."""
        planes = self.plan.shapes.planes
        chunk = lax.rem(self.rendezvous.axis_index + lax.div(batch, planes), self.devices)
        return lax.rem(batch, planes) * self.devices + chunk

    def load_tile(self, operands, stages, turn, batch, row, across) -> None:
        """Copies all slices that a tile is the product of, once its rows have arrived."""
        indices, (shard, gathered, arrived), ws = operands
        load = super().load_tile

        def load_from(x, plane, in_parts=None):
            load((indices, [x], ws), stages, turn, plane, row, across, in_parts)

        if self.plan.joins:
            pl.when(turn == 0)(functools.partial(self.prefetch, ws, across))
            shards = batch * self.devices
            load_from(gathered, batch, functools.partial(self.load_slabs, arrived, shards, row))
            return
        own_planes = self.plan.shapes.planes

        @pl.when(batch < own_planes)
        def _():
            load_from(shard, batch)

        @pl.when(batch >= own_planes)
        def _():
            plane = self.plane(batch)
            load_from(gathered, plane, functools.partial(self.load_slabs, arrived, plane, row))

    def load_slabs(self, arrived, plane, row, load, steps: int) -> None:
        """Copies the slices of a tile, slab by slab, each once it has arrived."""
        per_slab = steps // self.plan.slabs

        @pl.loop(0, self.plan.slabs)
        def _(slab):
            self.await_slab(arrived, plane, row, slab)
            load(slab * per_slab, (slab + 1) * per_slab)

    def prefetch(self, ws, across) -> None:
        """Has the weights of a tile copied into the cache, as far as there is place for all."""
        tiles = self.tiles
        slice_bytes = ITEMSIZE * tiles.contracted * tiles.columns

        def prefetch_slices(q, column):
            w = self.ws[0][q]
            read = reader(ws[0][q], w, [0] * (w.index + 1), 0, pl.ds(column, tiles.columns))

            @pl.loop(0, min(self.steps, _PREFETCHED_BYTES // slice_bytes))
            def _(step):
                along = pl.ds(step * tiles.contracted, tiles.contracted)
                plgpu.async_prefetch(read(0, along))

        self.on_result(across, prefetch_slices)

    def await_slab(self, arrived, plane, row, slab) -> None:
        """Waits for a slab of a tile's rows, counted from the beginning of a plane of one shard."""
        plan = self.plan
        rows = plan.shapes.rows
        end = rows * (self.devices if plan.joins else 1)

        def group(row):
            within = lax.div(lax.rem(row, rows), plan.rows_per_group)
            return lax.div(row, rows) * plan.groups + within

        last_row = jnp.minimum(row + self.tiles.rows, end) - 1

        @pl.loop(group(row), group(last_row) + 1)
        def _(number):
            semaphore = arrived.at[semaphore_of(plan, plane, number, slab)]
            boxes = boxes_of(plan, lax.rem(number, plan.groups))
            count = lax.div(boxes, plan.boxes_per_message)
            pl.semaphore_wait(semaphore, count, decrement=False)
