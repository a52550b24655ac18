"""A simulated `Rendezvous`, and the resources that a kernel requests, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP, ThreadScope
from tests.mosaic_gpu.simulated_memory import Reference
from tests.mosaic_gpu.simulation import AXIS, Simulation


class SimulatedRendezvous:
    """The rendezvous of a simulated block: it returns peer buffers after all peers published."""

    def __init__(
        self,
        simulation: Simulation,
        place: dict[str, int],
        others: dict[tuple[int, ...], SimulatedRendezvous],
        arrays: Sequence[list[np.ndarray]],
        scope: ThreadScope,
    ):
        """Adds the rendezvous of a block.

        Args:
          simulation: the simulation of the block's actors.
          place: of the block.
          others: the rendezvous of all blocks, by place. This one is added.
          arrays: the arrays that peers store to; each a list with one array for each device.
          scope: the threads that call this: a warp or a warpgroup.
        """
        self.simulation = simulation
        self.axis_index, *self.block = place.values()
        assert self.axis_index == place[AXIS]
        self.others = others
        others[self.axis_index, *self.block] = self
        self.arrays = arrays
        self.scope = scope
        self.published = self.peers_published = False

    def peer_index(self, offset: int) -> int:
        return (self.axis_index + offset) % len(self.arrays[0])

    def publish(self, scope: ThreadScope = WARPGROUP) -> None:
        assert scope == self.scope and not self.published
        self.simulation.here().wait()
        self.published = True

    def wait_for_peers(self, scope: ThreadScope = WARPGROUP) -> None:
        assert scope == self.scope and self.published
        places = [(self.peer_index(offset), *self.block) for offset in range(len(self.arrays[0]))]
        self.simulation.here().wait(lambda: all(self.others[p].published for p in places))
        self.peers_published = True

    def wait_for_count(
        self, semaphore: Reference, count: int, what: str, scope: ThreadScope = WARPGROUP
    ) -> None:
        assert scope == self.scope and what
        self.simulation.wait_for_count(semaphore, count)

    def peer_buffer(self, number: int, offset: int) -> PeerBuffer:
        assert self.peers_published
        arrays = self.arrays[number]
        return PeerBuffer(arrays[self.axis_index], arrays[self.peer_index(offset)], self.scope)


class PeerBuffer(NamedTuple):
    """An array of a device, the array of a peer in its place, and who may store there."""

    array: np.ndarray
    of_peer: np.ndarray
    scope: ThreadScope

    def part(self, place: Reference, scope: ThreadScope) -> Reference:
        """Returns the part of the peer's array that is at a place of this device's array."""
        assert place.array is self.array and scope == self.scope
        return Reference(self.of_peer, place.starts, place.sizes, place.kept)


class RequestedResources(NamedTuple):
    """The resources that a kernel requests.

    Attributes:
      scratch: shared memory and barriers of a block, by name.
      arrived: its semaphores.
      peer_arrays: the names of the arrays that peers store to.
    """

    scratch: dict[str, Any]
    arrived: Any
    peer_arrays: list[str]


def requested_resources(
    module: ModuleType, run: Callable[..., None], names: Sequence[str]
) -> RequestedResources:
    """Returns the resources that a kernel requests.

    Args:
      module: of the kernel.
      run: its body.
      names: of its operands and results.
    """
    requested = RequestedResources({}, [], [])

    def get_global(kind: Any) -> Named:
        requested.arrived.append(kind)
        return Named("arrived")

    def note_arrays(
        words: Any, devices: int, block: int, arrays: Sequence[Named], kernel: str
    ) -> None:
        requested.peer_arrays.extend(array.name for array in arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "block_index_and_count", lambda: (0, 1))
        patch.setattr(module, "Rendezvous", note_arrays)
        patch.setattr(module.pl, "get_global", get_global)
        patch.setattr(module.pl, "run_scoped", lambda _, **memory: requested.scratch.update(memory))
        run(None, *map(Named, names))
    (arrived,) = requested.arrived
    return requested._replace(arrived=arrived)


class Named(SimpleNamespace):
    """A stand-in for an array: it has a name and a dtype."""

    def __init__(self, name: str):
        super().__init__(name=name, dtype=jnp.bfloat16)
