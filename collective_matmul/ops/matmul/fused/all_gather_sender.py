"""The sender of `all_gather_kernel`: how a device sends its shard while it multiplies.

The shard is cut, from the outside in: planes, groups of rows, slabs of columns, and *boxes*, the
region that one copy moves. A *message* is one or a few consecutive boxes of a slab.

1. The senders, one warp of every block, take the messages of the shard in turn. A sender copies the
   boxes of its messages into shared memory, and from there into the `gathered` arrays of peers.
   When a whole message has been stored, it adds one to the peer's semaphore of that slab.
   Meanwhile later boxes are under way. If there are few rows, boxes are so small that a block has
   boxes of several slabs, and not only of one: so the first slab does not arrive with the last.
2. The shard is sent in passes, one after the other, to one or several peers each. Peers get it in
   the order in which they need it: those that need it at the same time, since all their tiles are
   multiplied at once, get each message in the same pass. Otherwise each device receives from one
   peer at a time, at full bandwidth.

A plain bulk copy moves contiguous memory: whole rows, or a part of one row. So boxes are copied in
contiguous *pieces*. (A copy of several pieces would need a descriptor, see `async_remote_store`.)
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

from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import block_index_and_count
from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar
from collective_matmul.mosaic_gpu.peers.peer_memory import WARP
from collective_matmul.mosaic_gpu.peers.remote_store import async_remote_store, signal_peers
from collective_matmul.mosaic_gpu.peers.rendezvous import Rendezvous
from collective_matmul.mosaic_gpu.race_injection import delay_warp, race_delay_steps
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

# Peer buffers by number: the order in which `AllGatherGemm.run` gives the arrays to `Rendezvous`.
_GATHERED, _ARRIVED = range(2)


def boxes_in(config: AllGatherConfig, group: Scalar) -> Scalar:
    """Returns the number of boxes in each slab of a group. The last group may have fewer."""
    full, all_groups = map(config.boxes_per_slab, (config.rows_per_group, config.problem.m))
    return jnp.minimum(full, all_groups - group * full)


def semaphore_index(config: AllGatherConfig, plane: Scalar, group: Scalar, slab: Scalar) -> Scalar:
    """Returns the index of a slab's semaphore.

    Args:
      config: configuration of the kernel.
      plane: index of a plane of `gathered`, which has one for each plane of each shard.
      group: index of a group of the plane; from the number of groups on, of the following planes.
      slab: index of a slab of the group.
    """
    return (plane * config.groups + group) * config.slabs + slab


class BoxCoord(NamedTuple):
    """The place of a box in a shard: its plane, group and slab, and its first row and column."""

    plane: Scalar
    group: Scalar
    slab: Scalar
    row: Scalar
    column: Scalar


class Sender:
    """The sender of one block: it sends the block's messages."""

    def __init__(
        self,
        config: AllGatherConfig,
        keep_gathered: bool,
        race_delays: bool,
        rendezvous: Rendezvous,
    ):
        self.config = config
        self.devices = config.problem.devices
        self.rendezvous = rendezvous
        self.race_delays = race_delays
        # Device e multiplies chunks e, e + 1, ...: so the device before this one needs the shard
        # first, the device after it last. By offset that is D - 1, D - 2, ..., 1.
        offsets = iter(range(self.devices - 1, 0, -1))
        # The receivers of each pass.
        self.receivers = [list(itertools.islice(offsets, count)) for count in config.peers_per_pass]
        if config.tiles_span_shards:
            self.receivers[0].append(0)
        elif keep_gathered:
            self.receivers.append([0])

    def send(self, shard: Ref, gathered: Ref, arrived: Ref, boxes: Ref, loaded: Ref) -> None:
        """Sends this block's messages to all receivers, and signals each when it has arrived.

        Rows are those as which x is sent, see `AllGatherConfig.lines_per_row`.

        Args:
          shard: this device's rows of x.
          gathered: this device's array, in whose peer buffers the shard is stored.
          arrived: this device's semaphores, in whose peer buffers messages are counted.
          boxes: shared memory for `config.buffers` boxes.
          loaded: a barrier for each of them.
        """
        config = self.config
        per_message = config.boxes_per_message
        this_block, blocks = block_index_and_count()
        messages = lax.div(config.messages - this_block + blocks - 1, blocks)
        # All boxes that this block sends, in all passes.
        count = messages * len(self.receivers) * per_message

        def locate(box: Scalar) -> tuple[Scalar, Scalar, Scalar]:
            """Returns the pass and the message of a box, and its number in the shard."""
            in_all_passes = lax.div(box, per_message)
            message = this_block + lax.rem(in_all_passes, messages) * blocks
            number = message * per_message + lax.rem(box, per_message)
            return lax.div(in_all_passes, messages), message, number

        def load(box: Scalar) -> None:
            buffer = lax.rem(box, config.buffers)
            self.load(shard, locate(box)[2], boxes.at[buffer], loaded.at[buffer])

        def signal(box: Scalar) -> None:
            pass_idx, message, _ = locate(box)
            self.signal_arrival(pass_idx, arrived.at[self.semaphore_of_message(message)])

        # Half of the buffers hold boxes that are being loaded, the other half boxes that are being
        # stored. So a box is signalled `ahead` boxes later, and later boxes need not wait for it.
        ahead = config.buffers // 2

        @pl.when(count > 0)
        def _() -> None:
            self.rendezvous.publish(WARP)
            pl.loop(0, jnp.minimum(ahead, count))(load)
            # Nothing is stored to a peer before it has entered the launch.
            self.rendezvous.wait_for_peers(WARP)

            @pl.loop(0, count + ahead)
            def _(box: Scalar) -> None:
                @pl.when(box < count)
                def _() -> None:
                    buffer = lax.rem(box, config.buffers)
                    plgpu.barrier_wait(loaded.at[buffer])
                    self.delay(box)
                    pass_idx, _, number = locate(box)
                    self.store(boxes.at[buffer], gathered, pass_idx, number)

                # One group for each box, and empty ones after the last box: so the copies of box b
                # have completed when at most `ahead` groups are pending after step b + ahead.
                plgpu.commit_smem_to_gmem_group()

                @pl.when(box + ahead < count)
                def _() -> None:
                    # The buffer of box b + ahead held box b + ahead - buffers. That has been read
                    # when at most buffers - ahead later groups are pending.
                    plgpu.wait_smem_to_gmem(config.buffers - ahead, wait_read_only=True)
                    load(box + ahead)

                # `per_message` boxes make a message; it is signalled with its last one.
                @pl.when((box >= ahead) & (lax.rem(box - ahead + 1, per_message) == 0))
                def _() -> None:
                    plgpu.wait_smem_to_gmem(ahead)
                    signal(box - ahead)

    def load(self, shard: Ref, number: Scalar, box: Ref, loaded: Ref) -> None:
        """Starts to copy a box of the shard, by its number, to shared memory."""
        coord = self.coord(number)

        @pl.loop(0, self.config.pieces)
        def _(piece: Scalar) -> None:
            plgpu.copy_gmem_to_smem(
                self.region(shard, coord, piece),
                self.piece_of(box, piece),
                loaded,
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def coord(self, number: Scalar) -> BoxCoord:
        """Returns where a box is: boxes count by slab, then by group, then by plane."""
        config = self.config
        height, width = config.box
        plane, within = (f(number, config.boxes_per_plane) for f in (lax.div, lax.rem))
        per_group = config.slabs * config.boxes_per_slab(config.rows_per_group)
        group, within = lax.div(within, per_group), lax.rem(within, per_group)
        per_slab = boxes_in(config, group)
        slab, within = lax.div(within, per_slab), lax.rem(within, per_slab)
        box_m, box_n = (f(within, config.boxes_across) for f in (lax.div, lax.rem))
        row = group * config.rows_per_group * config.lines_per_row + box_m * height
        return BoxCoord(plane, group, slab, row, slab * config.slab_columns + box_n * width)

    def region(self, array: Ref, coord: BoxCoord, piece: Scalar) -> Ref:
        """Returns the reference to a piece of a box in an array."""
        height, width = self.config.box
        rows = height // self.config.pieces
        return array.at[
            coord.plane, pl.ds(coord.row + piece * rows, rows), pl.ds(coord.column, width)
        ]

    def piece_of(self, box: Ref, piece: Scalar) -> Ref:
        """Returns the reference to a piece of a box in shared memory."""
        rows = self.config.box[0] // self.config.pieces
        return box.at[pl.ds(piece * rows, rows)]

    def semaphore_of_message(self, message: Scalar) -> Scalar:
        """Returns the index of the semaphore that counts a message of this device's shard."""
        config = self.config
        coord = self.coord(message * config.boxes_per_message)
        plane = coord.plane * self.devices + self.rendezvous.axis_index
        return semaphore_index(config, plane, coord.group, coord.slab)

    def store(self, box: Ref, gathered: Ref, pass_idx: Scalar, number: Scalar) -> None:
        """Starts to store a box at its place in `gathered` of the receivers of a pass."""
        coord = self.coord(number)
        axis_index = self.rendezvous.axis_index
        if self.config.tiles_span_shards:
            rows = self.config.problem.m * self.config.lines_per_row
            coord = coord._replace(row=coord.row + axis_index * rows)
        else:
            coord = coord._replace(plane=coord.plane * self.devices + axis_index)

        def store_to(offsets: list[int]) -> None:
            peer_buffers = [self.rendezvous.peer_buffer(_GATHERED, offset) for offset in offsets]

            @pl.loop(0, self.config.pieces)
            def _(piece: Scalar) -> None:
                piece_of_box = self.piece_of(box, piece)
                region = self.region(gathered, coord, piece)
                for peer_buffer in peer_buffers:
                    async_remote_store(piece_of_box, region, peer_buffer, scope=WARP)

        self.on_receivers(pass_idx, store_to)

    def signal_arrival(self, pass_idx: Scalar, semaphore: Ref) -> None:
        """Counts a message at those receivers of a pass that wait for it."""

        def signal(offsets: list[int]) -> None:
            # A device reads its own shard from x, unless tiles span shards.
            waiting = [offset for offset in offsets if offset or self.config.tiles_span_shards]
            if waiting:
                peer_buffers = [self.rendezvous.peer_buffer(_ARRIVED, o) for o in waiting]
                signal_peers(semaphore, peer_buffers, WARP)

        self.on_receivers(pass_idx, signal)

    def on_receivers(self, pass_idx: Scalar, act: Callable[[list[int]], None]) -> None:
        """Calls `act` with the offsets, as ints, of the receivers of a pass."""
        for number, offsets in enumerate(self.receivers):
            here = functools.partial(act, offsets)
            here() if len(self.receivers) == 1 else pl.when(pass_idx == number)(here)

    def delay(self, box: Scalar) -> None:
        """Waits for a random time before a box is stored, if tests ask for that."""
        if self.race_delays:
            this_device, this_block = self.rendezvous.axis_index, block_index_and_count()[0]
            delay_warp(race_delay_steps(this_device, box, this_block))
