"""The sender of `reduce_scatter_kernel`: how products are stored at their owners.

A tile's product is stored epilogue tile by epilogue tile. What is stored are raw epilogue tiles:
shared memory as it is, still swizzled. It is contiguous, which a plain bulk copy needs (see
`async_remote_store`), and is loaded to shared memory of the same swizzle by the owner.

A remote tile is sent while the next tile is multiplied. All at once, the stores would fill the
links, and the loads of the k-blocks would queue up after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import block_index_and_count
from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar, TileCoord
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP
from collective_matmul.mosaic_gpu.peers.remote_store import async_remote_store, signal_peers
from collective_matmul.mosaic_gpu.race_injection import delay_warpgroup, race_delay_steps
from collective_matmul.ops.matmul.fused.owner_tile_scheduler import (
    EpilogueTiles,
    OwnerTileScheduler,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

# Peer buffers by number: the order of `ReducedArrays`.
SUMS, PARTIALS, ARRIVED = range(3)

# One epilogue tile is sent in this many steps of the next tile. In about this time the epilogue
# tiles of all multiprocessors pass the links.
_STEPS_PER_EPILOGUE_TILE = 12


class ReducedArrays(NamedTuple):
    """References to the arrays that peers store to, in the order of their numbers.

    Attributes:
      y: the sums, [planes, m, n]; for "two_shot" raw epilogue tiles,
        [planes * D, n / epilogue_tile_n, m, epilogue_tile_n].
      partials: partial products of all sources, as raw epilogue tiles,
        [sources * planes, n / epilogue_tile_n, m, epilogue_tile_n].
      arrived: a semaphore for each local tile, and one for the sums of the peers.
    """

    y: Ref
    partials: Ref
    arrived: Ref


class ConsumerPart(NamedTuple):
    """A consumer's part of every tile, and the shared memory that it is stored from.

    Attributes:
      consumer: index of the MMA warpgroup.
      row_offset: rows of the tile above the part.
      column_offset: columns of the tile before the part.
      store_tiles: shared memory for the part's epilogue tiles.
      arrays: where products and sums go.
    """

    consumer: Scalar
    row_offset: Scalar
    column_offset: Scalar
    store_tiles: EpilogueTiles
    arrays: ReducedArrays


class TileSender:
    """Sends one consumer's part of tiles to their owners."""

    def __init__(self, scheduler: OwnerTileScheduler, part: ConsumerPart, race_delays: bool):
        self.scheduler = scheduler
        self.config = scheduler.config
        self.problem = scheduler.problem
        self.tiling = scheduler.tiling
        self.rendezvous = scheduler.rendezvous
        self.part = part
        self.race_delays = race_delays

    def send_previous_tile(
        self, tile_idx: Scalar, mma: Callable[[Scalar, Scalar, Any], Any], carry: Any
    ) -> Any:
        """Multiplies a tile. Meanwhile it sends the tile before this one, if that is remote.

        It is what `PersistentGemm.multiply` calls in_parts.
        """
        steps = self.scheduler.steps
        if not self.config.remote_tiles:
            return mma(0, steps, carry)
        count = self.tiling.epilogue_tiles_per_warpgroup
        pace = min(steps // (count + 2), _STEPS_PER_EPILOGUE_TILE)

        def multiply_and_send(number: Scalar, carry: Any) -> Any:
            carry = mma(number * pace, (number + 1) * pace, carry)
            send = functools.partial(self.send_epilogue_tile, number)
            self.on_remote_tile(tile_idx - 1, send)
            return carry

        carry = lax.fori_loop(0, count, multiply_and_send, carry)
        carry = mma(count * pace, (count + 1) * pace, carry)
        self.on_remote_tile(tile_idx - 1, self.signal_owners)
        return mma((count + 1) * pace, steps, carry)

    def on_remote_tile(self, tile_idx: Scalar, act: Callable[[TileCoord], None]) -> None:
        """Calls ``act(tile)`` with the block's tile of this number if it is there and remote."""
        if self.config.remote_tiles:

            @pl.when((tile_idx >= 0) & (tile_idx < self.scheduler.remote_tiles_of_block()))
            def _() -> None:
                act(self.scheduler.tile_at(tile_idx))

    def send_tile(self, tile: TileCoord) -> None:
        """Sends the rounded product of a tile to its owners, and signals them."""

        @pl.loop(0, self.tiling.epilogue_tiles_per_warpgroup)
        def _(number: Scalar) -> None:
            self.send_epilogue_tile(number, tile)

        self.signal_owners(tile)

    def send_epilogue_tile(self, number: Scalar, tile: TileCoord) -> None:
        """Starts to store an epilogue tile of a product in the partial products of its owners."""
        devices, planes = self.problem.devices, self.problem.planes
        column = self.scheduler.first_column(tile) + self.part.column_offset
        column += number * self.tiling.epilogue_tile_n
        if self.race_delays:
            steps = race_delay_steps(
                self.rendezvous.axis_index,
                tile.batch + tile.row + self.part.row_offset + column,
                block_index_and_count()[0],
            )
            delay_warpgroup(steps)
        store_tile = self.part.store_tiles.select(number)
        for offset in self.scheduler.receivers:
            # At its owner, this device's product is at the place in which it is added: counted by
            # device index in the one-shot all-reduce, and else from the device after the owner on.
            is_one_shot = self.problem.kind == "one_shot"
            source = self.rendezvous.axis_index if is_one_shot else devices - offset - 1
            plane = self.part.arrays.partials.at[source * planes + tile.batch]
            owner = self.rendezvous.peer_index(offset)
            peer_buffer = self.rendezvous.peer_buffer(PARTIALS, offset)
            row = tile.row + self.part.row_offset
            regions = self.scheduler.regions_for(store_tile, plane, owner, row, column)
            for region, place, has_it in regions:
                async_remote_store(region, place, peer_buffer, has_it, scope=WARPGROUP)
        plgpu.commit_smem_to_gmem_group()

    def signal_owners(self, tile: TileCoord) -> None:
        """Signals a tile to its owners, after this consumer's part of it has been stored there."""
        plgpu.wait_smem_to_gmem(0)

        @pl.loop(self.scheduler.receivers.start, self.scheduler.receivers.stop)
        def _(offset: Scalar) -> None:
            owner = self.rendezvous.peer_index(offset)

            @pl.when(self.scheduler.owns(owner, tile.row))
            def _() -> None:
                index = self.scheduler.local_tile_index(owner, tile)
                peer_buffer = self.rendezvous.peer_buffer(ARRIVED, offset)
                signal_peers(self.part.arrays.arrived.at[index], [peer_buffer], WARPGROUP)
