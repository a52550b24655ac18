"""How a device sends its shard to its peers while it multiplies: the senders of `gather_kernel`.

1. The senders, one warp of every block, cut the device's own shard into boxes. Each copies its
   share into shared memory, and from there into the gathered array of a peer. Whoever stored a
   message, one or a few boxes, waits until it has arrived, and counts up the peer's semaphore of
   what it is part of. Meanwhile later boxes are on their way. If rows are few, boxes are so small
   that a block has some of several slabs, and not one of a single slab: so the first slab does not
   arrive with the last.
2. Peers get the shard in the order in which they need it. Those that need it at the same time,
   since all their tiles are multiplied at once, get each message in one pass; others one after the
   other, so that to each device one sends at any time, with all the bandwidth there is.

Whole rows, or a part of one, are one piece of memory, whose copy needs an address and no more. So
boxes are copied piece by piece. Peers tell their addresses when they come to the launch
(`rendezvous`), and senders wait for them. A copy of several pieces would need a descriptor, which the
host makes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.backends.fused.all_gather_config import AllGatherConfig
from collective_matmul.mosaic_gpu.matmul_kernel import block_index_and_count
from collective_matmul.mosaic_gpu.peer_memory import WARP
from collective_matmul.mosaic_gpu.race_injection import delay_warp, race_delay_steps
from collective_matmul.mosaic_gpu.remote_store import async_remote_store, signal_peers

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# The numbers of the arrays that peers store to, in the order in which `gather_kernel` gives them to
# `rendezvous.Rendezvous`.
_GATHERED, _ARRIVED = range(2)


def boxes_of(config: AllGatherConfig, group: Any) -> Any:
    """How many boxes a slab of a group is sent in: the last group may have fewer."""
    full, all_groups = map(config.boxes_per_slab, (config.rows_per_group, config.problem.m))
    return jnp.minimum(full, all_groups - group * full)


def semaphore_of(config: AllGatherConfig, plane: Any, group: Any, slab: Any) -> Any:
    """The number of a slab's semaphore; groups count from the first of a plane of one shard on."""
    return (plane * config.groups + group) * config.slabs + slab


class Place(NamedTuple):
    """Where a box is in a shard: its plane, group and slab, and its first row and column."""

    plane: Any
    group: Any
    slab: Any
    row: Any
    column: Any


class Sender:
    """What a block's sender does: it sends the block's share of the shard."""

    def __init__(self, config: AllGatherConfig, keep: bool, delays: bool, peers):
        self.config = config
        self.devices = config.problem.devices
        # As of `rendezvous`.
        self.rendezvous = peers
        self.delays = delays
        # By offset along the axis, farthest first: each device needs the shards in this order.
        offsets = iter(range(self.devices - 1, 0, -1))
        # Of each pass over the shard.
        self.receivers = [list(itertools.islice(offsets, count)) for count in config.peers_per_pass]
        if config.tiles_span_shards:
            self.receivers[0].append(0)
        elif keep:
            self.receivers.append([0])

    def send(self, shard, gathered, arrived, boxes, loaded) -> None:
        """Copies this block's messages to all receivers, and counts each once it has arrived."""
        config = self.config
        per_message = config.boxes_per_message
        this, blocks = block_index_and_count()
        messages = lax.div(config.messages - this + blocks - 1, blocks)
        count = messages * len(self.receivers) * per_message

        def locate(box):
            """The pass and the message that a box is part of, and its number in the shard."""
            turn = lax.div(box, per_message)
            message = this + lax.rem(turn, messages) * blocks
            number = message * per_message + lax.rem(box, per_message)
            return lax.div(turn, messages), message, number

        def load(box):
            slot = lax.rem(box, config.buffers)
            self.load(shard, locate(box)[2], boxes.at[slot], loaded.at[slot])

        def signal(box):
            passed, message, _ = locate(box)
            self.count_arrival(passed, arrived.at[self.semaphore(message)])

        # So many boxes are loaded before they are sent, and so many more are sent before one is
        # counted: later ones do not wait until earlier ones have arrived.
        ahead = config.buffers // 2

        @pl.when(count > 0)
        def _():
            self.rendezvous.publish(WARP)
            pl.loop(0, jnp.minimum(ahead, count))(load)
            self.rendezvous.wait_for_peers(WARP)

            @pl.loop(0, count + ahead)
            def _(box):
                @pl.when(box < count)
                def _():
                    slot = lax.rem(box, config.buffers)
                    plgpu.barrier_wait(loaded.at[slot])
                    self.delay(box)
                    passed, _, number = locate(box)
                    self.post(boxes.at[slot], gathered, passed, number)

                # One for each box, and empty ones behind the last.
                plgpu.commit_smem_to_gmem_group()

                @pl.when(box + ahead < count)
                def _():
                    plgpu.wait_smem_to_gmem(config.buffers - ahead, wait_read_only=True)
                    load(box + ahead)

                @pl.when((box >= ahead) & (lax.rem(box - ahead + 1, per_message) == 0))
                def _():
                    plgpu.wait_smem_to_gmem(ahead)
                    signal(box - ahead)

    def load(self, shard, number, box, loaded) -> None:
        """Starts to copy a box, by its number, of the shard to shared memory."""
        place = self.place(number)

        @pl.loop(0, self.config.pieces)
        def _(piece):
            plgpu.copy_gmem_to_smem(
                self.region(shard, place, piece),
                self.piece_of(box, piece),
                loaded,
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def place(self, number) -> Place:
        """Where a box is: planes are sent one by one, in each its groups, in each its slabs."""
        config = self.config
        high, wide = config.box
        plane, within = (f(number, config.boxes_per_plane) for f in (lax.div, lax.rem))
        per_group = config.slabs * config.boxes_per_slab(config.rows_per_group)
        group, within = lax.div(within, per_group), lax.rem(within, per_group)
        per_slab = boxes_of(config, group)
        slab, within = lax.div(within, per_slab), lax.rem(within, per_slab)
        down, across = (f(within, config.boxes_across) for f in (lax.div, lax.rem))
        row = group * config.rows_per_group + down * high
        return Place(plane, group, slab, row, slab * config.slab_columns + across * wide)

    def region(self, array, place: Place, piece) -> Any:
        """What a piece of a box holds of an array."""
        high, wide = self.config.box
        rows = high // self.config.pieces
        return array.at[
            place.plane, pl.ds(place.row + piece * rows, rows), pl.ds(place.column, wide)
        ]

    def piece_of(self, box, piece) -> Any:
        """A piece of a box, which is one piece of memory."""
        rows = self.config.box[0] // self.config.pieces
        return box.at[pl.ds(piece * rows, rows)]

    def semaphore(self, message) -> Any:
        """The number of the semaphore that counts a message of this device's shard."""
        config = self.config
        place = self.place(message * config.boxes_per_message)
        own = place.plane * self.devices + self.rendezvous.axis_index
        return semaphore_of(config, own, place.group, place.slab)

    def post(self, box, gathered, passed, number) -> None:
        """Sends a box off to its place at the receivers of a pass."""
        place = self.place(number)
        me = self.rendezvous.axis_index
        if self.config.tiles_span_shards:
            place = place._replace(row=place.row + me * self.config.problem.m)
        else:
            place = place._replace(plane=place.plane * self.devices + me)

        def copy(offsets):
            peer_buffers = [self.rendezvous.peer_buffer(_GATHERED, offset) for offset in offsets]

            @pl.loop(0, self.config.pieces)
            def _(piece):
                piece_of_box = self.piece_of(box, piece)
                region = self.region(gathered, place, piece)
                for peer_buffer in peer_buffers:
                    async_remote_store(piece_of_box, region, peer_buffer, scope=WARP)

        self.on_receivers(passed, copy)

    def count_arrival(self, passed, semaphore) -> None:
        """Counts a message at those receivers of a pass that await it."""

        def count(offsets):
            awaiting = [offset for offset in offsets if offset or self.config.tiles_span_shards]
            if awaiting:
                peer_buffers = [
                    self.rendezvous.peer_buffer(_ARRIVED, offset) for offset in awaiting
                ]
                signal_peers(semaphore, peer_buffers, WARP)

        self.on_receivers(passed, count)

    def on_receivers(self, passed, act: Callable[[list[int]], None]) -> None:
        """Calls `act` with the offsets, numbers, of the devices that a pass is for."""
        for number, offsets in enumerate(self.receivers):
            here = functools.partial(act, offsets)
            here() if len(self.receivers) == 1 else pl.when(passed == number)(here)

    def delay(self, box) -> None:
        """Waits for a time that no two boxes have in common, if asked to."""
        if self.delays:
            this_device, this_block = self.rendezvous.axis_index, block_index_and_count()[0]
            delay_warp(race_delay_steps(this_device, box, this_block))
