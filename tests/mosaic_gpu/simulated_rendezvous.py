"""The peers of a simulated kernel's blocks, which these meet as by `rendezvous.Rendezvous`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP, ThreadScope
from tests.mosaic_gpu.simulated_memory import Reference
from tests.mosaic_gpu.simulation import AXIS, Simulation


class SimulatedRendezvous:
    """What all actors of a block have of its peers: arrays, when they have come."""

    def __init__(
        self,
        simulation: Simulation,
        place: dict[str, int],
        others: dict[tuple[int, ...], SimulatedRendezvous],
        arrays: Sequence[list[np.ndarray]],
        scope: ThreadScope,
    ):
        """A block's; `others` has those of all blocks by their places, and gets this.

        Args:
          simulation: that the block's actors act in.
          place: of the block.
          others: by their places.
          arrays: each of all devices.
          scope: of the actors.
        """
        self.simulation = simulation
        self.axis_index, *self.block = place.values()
        assert self.axis_index == place[AXIS]
        self.others = others
        others[self.axis_index, *self.block] = self
        self.arrays = arrays
        self.scope = scope
        self.published = self.have_come = False

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
        self.have_come = True

    def peer_buffer(self, number: int, offset: int) -> PeerBuffer:
        assert self.have_come
        arrays = self.arrays[number]
        return PeerBuffer(arrays[self.axis_index], arrays[self.peer_index(offset)], self.scope)


class PeerBuffer(NamedTuple):
    """An array of a device, its peer_buffer on a peer, and who may store there."""

    array: np.ndarray
    other: np.ndarray
    scope: ThreadScope

    def part(self, place: Reference, scope: ThreadScope) -> Reference:
        """What of the peer_buffer is such a part of the array."""
        assert place.array is self.array and scope == self.scope
        return Reference(self.other, place.starts, place.sizes, place.kept)


class RequestedResources(NamedTuple):
    """What a kernel asks for.

    Attributes:
      scratch: memory that the warpgroups of a block share, by name.
      arrived: semaphores.
      reached: the names of the arrays that peers store to.
    """

    scratch: dict[str, Any]
    arrived: Any
    reached: list[str]


def requested_resources(
    module: ModuleType, run: Callable[..., None], names: Sequence[str]
) -> RequestedResources:
    """What a kernel of a module asks for; its operands and results have names."""
    requested = RequestedResources({}, [], [])

    def get_global(kind: Any) -> Named:
        requested.arrived.append(kind)
        return Named("arrived")

    def meet(words: Any, devices: int, block: int, arrays: Sequence[Named]) -> None:
        requested.reached.extend(array.name for array in arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "block_index_and_count", lambda: (0, 1))
        patch.setattr(module, "Rendezvous", meet)
        patch.setattr(module.pl, "get_global", get_global)
        patch.setattr(module.pl, "run_scoped", lambda _, **memory: requested.scratch.update(memory))
        run(None, *map(Named, names))
    (arrived,) = requested.arrived
    return requested._replace(arrived=arrived)


class Named(SimpleNamespace):
    """An array that has a name and a dtype, and no elements."""

    def __init__(self, name: str):
        super().__init__(name=name, dtype=jnp.bfloat16)
