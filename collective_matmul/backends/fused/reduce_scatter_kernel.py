"""Kernels that sum products over devices while they multiply.

``y = reduce_scatter(sum over p of xs[p] @ ws[p])``, or ``all_reduce`` of it

One launch of the persistent matmul of `matmul_kernel`. Peers' memory is addressed directly.

The algorithm, on device d of D, each of which owns some rows of the sum:

1. The tiles without an own row are walked first, beginning with the rows behind the device's own,
   so that at any time every device sends to another one. Consumers round the product of a tile and
   store it in the memory of its owner, who keeps one array of partial products for each peer.
2. They do so strip by strip while the first steps of the next tile are multiplied: all at once, the
   stores would fill the links, and the producer's copies wait behind them. When they have ended, a
   semaphore of the tile is counted up at the owner.
3. The tiles with own rows come last. When such a tile is multiplied its producer waits until all
   peers have counted, and passes their partial products to the consumers through the same stages
   as the slices before. The consumers add them to the accumulator in float32, always in the same
   order, round once and store the sum. No pass of its own adds anything.

Where a tile is higher than what one device owns, its rows are *shared* by several owners, who all
have it among their own tiles: they send the other owners' rows of it before they sum theirs.

An all-reduce of more than a few rows takes two steps: it is the same with the rows dealt out, and
sums are stored in the results of all devices. A small one takes one shot: every device owns all
rows, and sends its rounded products to all devices, itself included. All add them in the order of
the devices, so that their sums are the same bits.

What goes to peers goes in contiguous blocks, images of swizzled shared memory: their copies take
plain addresses, which peers tell when they come to the launch (`rendezvous`). Copies of other boxes
take descriptors, which the host makes.

No device waits at the start. While the first tile is multiplied its producer waits for all peers:
their buffers are free then, and the semaphores, which every launch gets anew, zero. No kernel ends
before all stores to its device have been counted. Nobody waits for a tile whose sender waits for
another one: sends come before any wait, but for shared tiles, which all their owners
walk over with the same blocks in the same order. All blocks are resident at once: there are as many
as fit, and clusters of two, which fit everywhere.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.backends.fused.owner_tile_scheduler import OwnersWalk, Strips
from collective_matmul.backends.fused.reduce_scatter_config import ReduceScatterConfig
from collective_matmul.mosaic_gpu.matmul_kernel import block_index_and_count
from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP
from collective_matmul.mosaic_gpu.race_injection import delay_warpgroup, race_delay_steps
from collective_matmul.mosaic_gpu.remote_store import async_remote_store, signal_peers
from collective_matmul.mosaic_gpu.rendezvous import Rendezvous
from collective_matmul.mosaic_gpu.tiling import CONSUMERS

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# The numbers of the arrays that peers store to.
_SUMS, _PARTIALS, _ARRIVED = range(3)

# Of a tile's strips, one is sent in so many steps of the next tile: in about this time all
# multiprocessors' strips pass the links.
_STRIP_STEPS = 12


class Part(NamedTuple):
    """A consumer's part of every tile, and what it goes to.

    Attributes:
      consumer: its number.
      below: rows of the tile above the part.
      right: columns of the tile before the part.
      strips: the shared memory that its products and sums are sent from.
      y: the sums.
      partials: partial products of peers.
      arrived: counts them.
    """

    consumer: Any
    below: Any
    right: Any
    strips: Strips
    y: Any
    partials: Any
    arrived: Any


class Scattering(OwnersWalk):
    """The kernel's body."""

    def __init__(self, config: ReduceScatterConfig, delays: bool, xs, ws):
        super().__init__(config, xs, ws)
        self.delays = delays
        # Found in `run`: tells the consumers that all peers have come.
        self.met: Any = None
        # The memory of x's stages as strips of partial products, which the first of each comes in.
        self.incoming = Strips(None, None)
        first = 0 if config.problem.kind == "one_shot" else 1
        self.receivers = range(first, config.problem.devices)

    def run(self, words, *refs) -> None:
        """What every warpgroup of every block runs; words: see `workspace_pointers`."""
        terms = len(self.xs)
        xs, ws, (y, partials) = refs[:terms], [[w] for w in refs[terms : 2 * terms]], refs[-2:]
        # The last one counts the blocks of peers that have stored all their sums here.
        count = self.config.local_tiles + 1
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        # Every operand has one plane, or its planes are found without an index.
        indices = [0] * (2 * terms + 1)
        self.rendezvous = Rendezvous(
            words, self.problem.devices, block_index_and_count(), (y, partials, arrived)
        )

        @functools.partial(pl.run_scoped, **self.scratch(xs[0].dtype), collective_axes="warpgroup")
        def _(**scratch):
            scratch["x_slices"], *incoming = scratch["x_slices"]
            self.incoming = Strips(*incoming)
            scratch["strips"] = Strips(*scratch["strips"])
            self.met = scratch["met"]
            operands, results = (xs, partials, arrived), (y, partials, arrived)
            self.play(indices, operands, ws, results, scratch)

    def shared_memory(self, dtype: Any) -> dict[str, Any]:
        """That of a matmul; also the images of what goes to peers and of what comes from them."""
        memory, tiling = super().shared_memory(dtype), self.tiling
        strip = tiling.tile_m, tiling.epilogue_tile_n
        incoming = tiling.max_concurrent_steps, tiling.tile_k // tiling.epilogue_tile_n, *strip
        x_slices, strips = memory["x_slices"], memory["strips"]

        def image(shape: tuple[int, ...]) -> Any:
            return plgpu.SMEM(shape, dtype)

        swizzled = plgpu.SMEM(incoming, dtype, transforms=strips.transforms)
        return memory | {
            "x_slices": plgpu.RefUnion(x_slices, swizzled, image(incoming)),
            "strips": plgpu.RefUnion(strips, image(strips.shape)),
        }

    def barriers(self) -> dict[str, Any]:
        """Those of a matmul, and what tells consumers that they may store to peers."""
        return super().barriers() | {"met": plgpu.Barrier()}

    @property
    def strip_swizzle(self) -> int:
        """That of the stages, which images of strips are loaded to."""
        return self.tiling.swizzle

    # The producer.

    def produce(self, operands, stages) -> None:
        """Fills the stages; one block waits for the sums that peers store here."""
        self.rendezvous.publish()
        super().produce(operands, stages)
        if self.problem.kind == "two_shot":
            _, (_, _, arrived), _ = operands

            @pl.when(block_index_and_count()[0] == 0)
            def _():
                count = (self.problem.devices - 1) * self.blocks_with_tiles() * CONSUMERS
                pl.semaphore_wait(arrived.at[self.config.local_tiles], count, decrement=False)

    def load_tile(self, operands, stages, turn, batch, row, across) -> None:
        """Copies all slices that a tile is the product of, and what peers add to it."""
        indices, (xs, partials, arrived), ws = operands
        super().load_tile((indices, xs, ws), stages, turn, batch, row, across)

        @pl.when(turn == 0)
        def _():
            self.rendezvous.wait_for_peers()
            plgpu.barrier_arrive(self.met)

        @pl.when(turn >= self.foreign_turns())
        def _():
            self.load_partials(partials, arrived, stages, turn, batch, row, across)

    def load_partials(self, partials, arrived, stages, turn, batch, row, across) -> None:
        """Copies the partial products of an own tile, slice by slice, as `collect` takes them."""
        config, tiling = self.config, self.tiling
        width = tiling.epilogue_tile_n
        _, _, filled, consumed = stages
        me = self.rendezvous.axis_index
        # Of a cluster's blocks, maybe only one has own rows; but they fill their stages together.
        here = self.owns(me, row)
        first = self.first_row(me)

        @pl.when(here)
        def _():
            semaphore = arrived.at[self.number(me, batch, row, across)]
            pl.semaphore_wait(semaphore, config.sources * CONSUMERS, decrement=False)

        @pl.loop(0, config.partial_steps)
        def _(step):
            slot = self.slot(turn, self.steps + step)

            @pl.when(self.first_step(turn) + self.steps + step >= tiling.max_concurrent_steps)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            half = lax.rem(step, config.halves)
            source = lax.rem(lax.div(step, config.halves), config.sources)
            chunk = lax.div(step, config.halves * config.sources)
            column = self.column(across) + half * tiling.warpgroup_tile[1] + chunk * width
            plane = source * config.problem.planes + batch
            blocks = partials.at[plane, lax.div(column, width)]

            @pl.when(here)
            def _():
                rows, place = tiling.tile_m, self.incoming.image.at[slot, 0]
                if self.problem.m < rows:
                    # The stage keeps what it had in all other rows: they are not stored.
                    rows = self.problem.m
                    place = place.at[pl.ds(first - row, rows)]
                start = jnp.maximum(row - first, 0)
                plgpu.copy_gmem_to_smem(blocks.at[pl.ds(start, rows)], place, filled.at[slot])

            @pl.when(jnp.logical_not(here))
            def _():
                plgpu.barrier_arrive(filled.at[slot])

            # In place of a slice of w.
            plgpu.barrier_arrive(filled.at[slot])

    # The consumers.

    def consume(self, indices, consumer, stages, strips, results) -> None:
        """Multiplies this consumer's part of each tile; sends it to its owners or sums it up."""
        del indices
        config = self.config
        rows, columns = self.tiling.warpgroup_tile
        below = consumer * rows if self.tiling.wg_dimension == "m" else 0
        right = consumer * columns if self.tiling.wg_dimension == "n" else 0
        part = Part(consumer, below, right, strips.select(consumer), *results)
        slices = pl.ds(below, rows), pl.ds(right, columns)

        def visit(turn, batch, row, across):
            @functools.partial(pl.run_scoped, accumulator=plgpu.ACC((rows, columns), jnp.float32))
            def _(accumulator):
                multiply = functools.partial(self.multiply, accumulator, turn, *slices, stages)
                begun = self.send_before(turn, part, multiply)
                multiply((begun, self.steps))
                product = accumulator[...]
                plgpu.barrier_arrive(stages[3].at[self.slot(turn, self.steps - 1)])
                pl.when(turn == 0)(functools.partial(plgpu.barrier_wait, self.met))
                own = turn >= self.foreign_turns()

                @pl.when(jnp.logical_not(own) | config.tiles_span_owners)
                def _():
                    self.keep(product, part)

                @pl.when(own)
                def _():
                    if config.tiles_span_owners:
                        self.send(part, batch, row, across)
                    self.collect(product, turn, part, batch, row, across, stages)

        self.walk(visit)
        self.on_foreign(self.turns() - 1, functools.partial(self.send, part))
        plgpu.wait_smem_to_gmem(0)
        if self.problem.kind == "two_shot":

            @pl.when(self.turns() > 0)
            def _():
                peer_buffers = [
                    self.rendezvous.peer_buffer(_ARRIVED, offset) for offset in self.receivers
                ]
                signal_peers(part.arrived.at[config.local_tiles], peer_buffers, WARPGROUP)

    def keep(self, product, part: Part) -> None:
        """Rounds a part's product to strips, which it is sent from."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number in range(self.tiling.epilogue_tiles_per_warpgroup):
            self.fill(part.strips.select(number), product, number)
        plgpu.commit_smem()

    def fill(self, strip: Strips, value, number: int) -> None:
        """Rounds some columns of a value to a strip."""
        width = self.tiling.epilogue_tile_n
        rounded = value[:, number * width : (number + 1) * width].astype(strip.swizzled.dtype)
        strip.swizzled[...] = rounded

    def send_before(self, turn, part: Part, multiply) -> Any:
        """Sends the tile before this one, strip by strip, while the first steps are multiplied.

        All at once they would fill the links, and the copies of slices wait behind them.

        Returns:
          How many steps those are.
        """
        if not self.config.remote_tiles:
            return 0
        count = self.tiling.epilogue_tiles_per_warpgroup
        pace = min(self.steps // (count + 2), _STRIP_STEPS)

        @pl.loop(0, count)
        def _(number):
            multiply((number * pace, (number + 1) * pace))
            self.on_foreign(turn - 1, functools.partial(self.send_strip, part, number))

        multiply((count * pace, (count + 1) * pace))
        self.on_foreign(turn - 1, functools.partial(self.count_tile, part))
        return (count + 1) * pace

    def on_foreign(self, turn, act) -> None:
        """Calls `act` with the place of a turn's tile, if there is one and it has no own row."""
        if self.config.remote_tiles:

            @pl.when((turn >= 0) & (turn < self.foreign_turns()))
            def _():
                act(*self.locate(turn))

    def send(self, part: Part, batch, row, across) -> None:
        """Sends what is kept to the owners of a tile, and counts it there."""

        @pl.loop(0, self.tiling.epilogue_tiles_per_warpgroup)
        def _(number):
            self.send_strip(part, number, batch, row, across)

        self.count_tile(part, batch, row, across)

    def send_strip(self, part: Part, number, batch, row, across) -> None:
        """Starts to store a strip of a tile where its owners sum it up."""
        devices, planes = self.problem.devices, self.problem.planes
        column = self.column(across) + part.right + number * self.tiling.epilogue_tile_n
        if self.delays:
            delay_warpgroup(
                race_delay_steps(
                    self.rendezvous.axis_index,
                    batch + row + part.below + column,
                    block_index_and_count()[0],
                )
            )
        strip = part.strips.select(number)
        for offset in self.receivers:
            one_shot = self.problem.kind == "one_shot"
            source = self.rendezvous.axis_index if one_shot else devices - offset - 1
            plane, owner = (
                part.partials.at[source * planes + batch],
                self.rendezvous.peer_index(offset),
            )
            peer_buffer = self.rendezvous.peer_buffer(_PARTIALS, offset)
            for box, place, has_it in self.blocks(strip, plane, owner, row + part.below, column):
                async_remote_store(box, place, peer_buffer, has_it, scope=WARPGROUP)
        plgpu.commit_smem_to_gmem_group()

    def count_tile(self, part: Part, batch, row, across) -> None:
        """Counts a tile at its owners, once this consumer's part of it is stored there."""
        plgpu.wait_smem_to_gmem(0)

        @pl.loop(self.receivers.start, self.receivers.stop)
        def _(offset):
            owner = self.rendezvous.peer_index(offset)

            @pl.when(self.owns(owner, row))
            def _():
                semaphore = part.arrived.at[self.number(owner, batch, row, across)]
                signal_peers(semaphore, [self.rendezvous.peer_buffer(_ARRIVED, offset)], WARPGROUP)

    def collect(self, product, turn, part: Part, batch, row, across, stages) -> None:
        """Adds what the stages bring to an own tile's part, and stores the sum."""
        config, width = self.config, self.tiling.epilogue_tile_n
        _, _, filled, consumed = stages
        rows = pl.ds(part.below, self.tiling.warpgroup_tile[0])

        for chunk in range(config.tiling.epilogue_tiles_per_warpgroup):
            value = product[:, chunk * width : (chunk + 1) * width]
            for source in range(config.sources):
                step = self.steps + (chunk * config.sources + source) * config.halves
                slots = [self.slot(turn, step + half) for half in range(config.halves)]
                for slot in slots:
                    plgpu.barrier_wait(filled.at[slot])
                mine = self.slot(turn, step + (part.consumer if config.halves > 1 else 0))
                partial = self.incoming.swizzled[mine, 0, rows, :].astype(jnp.float32)
                starts = self.problem.kind == "one_shot" and source == 0
                value = partial if starts else value + partial
                # What is copied here next must not overtake the reads of this warpgroup.
                plgpu.commit_smem()
                for slot in slots:
                    plgpu.barrier_arrive(consumed.at[slot])
            strip = part.strips.select(chunk)
            self.await_strip(chunk)
            self.fill(strip, value, 0)
            plgpu.commit_smem()
            column = self.column(across) + part.right + chunk * width
            self.store_sum(strip, part.y, batch, row + part.below, column)

    def store_sum(self, strip: Strips, y, batch, row, column) -> None:
        """Starts to copy a strip of sums to where it belongs."""
        if self.problem.kind == "two_shot":
            me = self.rendezvous.axis_index
            plane = y.at[batch * self.problem.devices + me]
            for offset in (0, *self.receivers):
                peer_buffer = self.rendezvous.peer_buffer(_SUMS, offset)
                for box, place, has_it in self.blocks(strip, plane, me, row, column):
                    async_remote_store(box, place, peer_buffer, has_it, scope=WARPGROUP)
        else:
            box, place, has_it = self.box(strip.swizzled, y.at[batch], row, column)
            plgpu.copy_smem_to_gmem(box, place, has_it, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
