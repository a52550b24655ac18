"""One kernel that gathers the shards of x while it multiplies those that are here.

``ys[q] = all_gather(x) @ ws[q]``

A ring pays for every chunk: a launch, a rendezvous of the hosts, a last wave of tiles that does not
fill the GPU. This is one launch of the persistent matmul of `matmul_kernel`. Of the warpgroup that
copies in every block, one warp is the producer and another the sender: a warpgroup of its own would
leave the accumulators too few registers. Peers' memory is addressed directly.

The algorithm, on device d of D:

1. The senders cut the device's own shard into boxes. Each copies its share into shared memory, and
   from there into the gathered array of a peer. Whoever stored a message, one or a few boxes,
   waits until it has arrived, and counts up the peer's semaphore of what it is part of. Peers get
   the shard in the order in which they need it. Those that need it at the same time, since all
   their tiles are multiplied at once, get each message in one pass; others one after the other, so
   that to each device one sends at any time, with all the bandwidth there is.
2. The tiles of the results are walked chunk by chunk, from chunk d on, in the order of the rows in
   which all senders send. There is no boundary between chunks: one walk over all tiles.
3. Many rows are multiplied at once, all from their first column on. So of each such group of rows
   one slab of columns is sent after the other, and a producer waits, before it copies from a slab
   of another device's rows, until all messages of it have been counted. If whole rows were sent
   one after the other, tiles of the last would wait for all of a group. Chunk d a producer reads
   from x itself.

Where a tile is as high as several chunks, rows of all of them share tiles: the chunks *join*. Then
the device sends its shard to itself too, so that a tile lies in one array, and all in one pass.

Whole rows, or a part of one, are one piece of memory, whose copy needs an address and no more. So
boxes are copied piece by piece. Peers tell their addresses when they come to the launch
(`meeting`), and senders wait for them. A copy of several pieces would need a descriptor, which the
host makes.

Nothing but its senders waits when a device starts. When a peer has come, its buffers are free and
the semaphores, which every launch gets anew, zero. No kernel ends before all messages to it have
been counted, for each tile waits for its rows. Nothing else is ever written to another device, but
what is said in a meeting, in memory that stays. Every message is sent by a block that is resident:
there are as many blocks as fit at once, and clusters of two, which fit everywhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir

from collective_matmul.kernels.addresses import WARP, count_up, store_box
from collective_matmul.kernels.gather_plan import Plan
from collective_matmul.kernels.matmul_kernel import Work
from collective_matmul.kernels.meeting import Peers
from collective_matmul.kernels.operands import Operand, reader
from collective_matmul.kernels.peers import DELAY_NANOSECONDS, block, delays_of
from collective_matmul.kernels.tiles import ITEMSIZE

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# Of its weights, that a block has copied into the L2 cache while it waits for its first rows: all
# blocks together, about half of what the cache holds.
_PREFETCHED_BYTES = 196_608

# The numbers of the arrays that peers store to.
_GATHERED, _ARRIVED = range(2)


class Place(NamedTuple):
    """Where a box is in a shard: its plane, group and slab, and its first row and column."""

    plane: Any
    group: Any
    slab: Any
    row: Any
    column: Any


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
        # Found in `run`.
        self.peers: Any = None
        self.delays = delays
        # By offset along the axis, farthest first: each device needs the shards in this order.
        offsets = iter(range(self.devices - 1, 0, -1))
        # Of each pass over the shard.
        self.receivers = [list(itertools.islice(offsets, peers)) for peers in plan.passes]
        if plan.joins:
            self.receivers[0].append(0)
        elif keep:
            self.receivers.append([0])

    def run(self, words, shard, *refs) -> None:
        """What every warpgroup of every block runs; words are as of `workspace.addresses`."""
        ws, outs, gathered = refs[: self.results], refs[self.results : -1], refs[-1]
        plan = self.plan
        count = plan.shapes.planes * self.devices * plan.groups * plan.slabs
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        self.peers = Peers(words, self.devices, block(), (gathered, arrived))
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
            "loaded": plgpu.Barrier(
                num_arrivals=self.plan.pieces, num_barriers=self.plan.buffers
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
                self.send(shard, gathered, arrived, scratch["boxes"], scratch["loaded"])

    def out_plane(self, indices, batch) -> Any:
        """The plane of each result that a batch's tiles are stored in."""
        del indices
        return batch if self.plan.joins else self.plane(batch)

    def plane(self, batch) -> Any:
        """The plane of a batch of tiles whose shards do not join: this device's own come first."""
        planes = self.plan.shapes.planes
        chunk = lax.rem(self.peers.me + lax.div(batch, planes), self.devices)
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
            semaphore = arrived.at[(plane * plan.groups + number) * plan.slabs + slab]
            boxes = self.boxes_of(lax.rem(number, plan.groups))
            count = lax.div(boxes, plan.boxes_per_message)
            pl.semaphore_wait(semaphore, count, decrement=False)

    def boxes_of(self, group) -> Any:
        """How many boxes a slab of a group is sent in: the last group may have fewer."""
        plan = self.plan
        full, all_groups = map(plan.boxes_per_slab, (plan.rows_per_group, plan.shapes.rows))
        return jnp.minimum(full, all_groups - group * full)

    def send(self, shard, gathered, arrived, boxes, loaded) -> None:
        """Copies this block's messages to all receivers, and counts each once it has arrived."""
        plan = self.plan
        per_message = plan.boxes_per_message
        this, blocks = block()
        messages = lax.div(plan.messages - this + blocks - 1, blocks)
        count = messages * len(self.receivers) * per_message

        def locate(box):
            """The pass and the message that a box is part of, and its number in the shard."""
            turn = lax.div(box, per_message)
            message = this + lax.rem(turn, messages) * blocks
            number = message * per_message + lax.rem(box, per_message)
            return lax.div(turn, messages), message, number

        def load(box):
            slot = lax.rem(box, plan.buffers)
            place = self.place(locate(box)[2])

            @pl.loop(0, plan.pieces)
            def _(piece):
                plgpu.copy_gmem_to_smem(
                    self.region(shard, place, piece),
                    self.piece_of(boxes.at[slot], piece),
                    loaded.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        def signal(box):
            passed, message, _ = locate(box)
            self.count_arrival(passed, arrived.at[self.semaphore(message)])

        # So many boxes are loaded before they are sent, and so many more are sent before one is
        # counted: later ones do not wait until earlier ones have arrived.
        ahead = plan.buffers // 2

        @pl.when(count > 0)
        def _():
            self.peers.announce(WARP)
            pl.loop(0, jnp.minimum(ahead, count))(load)
            self.peers.await_all(WARP)

            @pl.loop(0, count + ahead)
            def _(box):
                @pl.when(box < count)
                def _():
                    slot = lax.rem(box, plan.buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    self.delay(box)
                    passed, _, number = locate(box)
                    self.post(boxes.at[slot], gathered, passed, number)

                # One for each box, and empty ones behind the last.
                plgpu.commit_smem_to_gmem_group()

                @pl.when(box + ahead < count)
                def _():
                    plgpu.wait_smem_to_gmem(plan.buffers - ahead, wait_read_only=True)
                    load(box + ahead)

                @pl.when((box >= ahead) & (lax.rem(box - ahead + 1, per_message) == 0))
                def _():
                    plgpu.wait_smem_to_gmem(ahead)
                    signal(box - ahead)

    def place(self, number) -> Place:
        """Where a box is: planes are sent one by one, in each its groups, in each its slabs."""
        plan = self.plan
        high, wide = plan.box
        plane, within = (f(number, plan.boxes_per_plane) for f in (lax.div, lax.rem))
        per_group = plan.slabs * plan.boxes_per_slab(plan.rows_per_group)
        group, within = lax.div(within, per_group), lax.rem(within, per_group)
        per_slab = self.boxes_of(group)
        slab, within = lax.div(within, per_slab), lax.rem(within, per_slab)
        down, across = (f(within, plan.boxes_across) for f in (lax.div, lax.rem))
        row = group * plan.rows_per_group + down * high
        return Place(plane, group, slab, row, slab * plan.slab_columns + across * wide)

    def region(self, array, place: Place, piece) -> Any:
        """What a piece of a box holds of an array."""
        high, wide = self.plan.box
        rows = high // self.plan.pieces
        return array.at[
            place.plane, pl.ds(place.row + piece * rows, rows), pl.ds(place.column, wide)
        ]

    def piece_of(self, box, piece) -> Any:
        """A piece of a box, which is one piece of memory."""
        rows = self.plan.box[0] // self.plan.pieces
        return box.at[pl.ds(piece * rows, rows)]

    def semaphore(self, message) -> Any:
        """The number of the semaphore that counts a message of this device's shard."""
        plan = self.plan
        place = self.place(message * plan.boxes_per_message)
        own = place.plane * self.devices + self.peers.me
        return (own * plan.groups + place.group) * plan.slabs + place.slab

    def post(self, box, gathered, passed, number) -> None:
        """Sends a box off to its place at the receivers of a pass."""
        place = self.place(number)
        me = self.peers.me
        if self.plan.joins:
            place = place._replace(row=place.row + me * self.plan.shapes.rows)
        else:
            place = place._replace(plane=place.plane * self.devices + me)

        def copy(offsets):
            twins = [self.peers.twin(_GATHERED, offset) for offset in offsets]

            @pl.loop(0, self.plan.pieces)
            def _(piece):
                piece_of_box = self.piece_of(box, piece)
                region = self.region(gathered, place, piece)
                for twin in twins:
                    store_box(piece_of_box, region, twin, lanes=WARP)

        self.on_receivers(passed, copy)

    def count_arrival(self, passed, semaphore) -> None:
        """Counts a message at those receivers of a pass that await it."""

        def count(offsets):
            awaiting = [offset for offset in offsets if offset or self.plan.joins]
            if awaiting:
                twins = [self.peers.twin(_ARRIVED, offset) for offset in awaiting]
                count_up(semaphore, twins, WARP)

        self.on_receivers(passed, count)

    def on_receivers(self, passed, act: Callable[[list[int]], None]) -> None:
        """Calls `act` with the offsets, numbers, of the devices that a pass is for."""
        for number, offsets in enumerate(self.receivers):
            here = functools.partial(act, offsets)
            here() if len(self.receivers) == 1 else pl.when(passed == number)(here)

    def delay(self, box) -> None:
        """Waits for a time that no two boxes have in common, if asked to."""
        if self.delays:

            @pl.loop(0, delays_of(self.peers.me, block()[0], box))
            def _(_):
                _sleep()


@plgpu.inline_mgpu()
def _sleep(_) -> None:
    """`pl.delay` is for whole warpgroups."""
    mosaic.nanosleep(mosaic.c(DELAY_NANOSECONDS, ir.IntegerType.get_signless(32)))
