"""The peers of a simulated kernel's blocks, which these meet as by `meeting.Peers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP, Lanes
from tests.mosaic_gpu.simulated_memory import Reference
from tests.mosaic_gpu.simulation import AXIS, Simulation


class Peers:
    """What all actors of a block have of its peers: arrays, when they have come."""

    def __init__(
        self,
        simulation: Simulation,
        place: dict[str, int],
        others: dict[tuple[int, ...], Peers],
        arrays: Sequence[list[np.ndarray]],
        lanes: Lanes,
    ):
        """A block's; `others` has those of all blocks by their places, and gets this.

        Args:
          simulation: that the block's actors act in.
          place: of the block.
          others: by their places.
          arrays: each of all devices.
          lanes: of the actors.
        """
        self.simulation = simulation
        self.me, *self.block = place.values()
        assert self.me == place[AXIS]
        self.others = others
        others[self.me, *self.block] = self
        self.arrays = arrays
        self.lanes = lanes
        self.announced = self.have_come = False

    def index(self, offset: int) -> int:
        return (self.me + offset) % len(self.arrays[0])

    def announce(self, lanes: Lanes = WARPGROUP) -> None:
        assert lanes == self.lanes and not self.announced
        self.simulation.here().wait()
        self.announced = True

    def await_all(self, lanes: Lanes = WARPGROUP) -> None:
        assert lanes == self.lanes and self.announced
        places = [(self.index(offset), *self.block) for offset in range(len(self.arrays[0]))]
        self.simulation.here().wait(lambda: all(self.others[p].announced for p in places))
        self.have_come = True

    def twin(self, number: int, offset: int) -> Twin:
        assert self.have_come
        arrays = self.arrays[number]
        return Twin(arrays[self.me], arrays[self.index(offset)], self.lanes)


class Twin(NamedTuple):
    """An array of a device, its twin on a peer, and who may store there."""

    array: np.ndarray
    other: np.ndarray
    lanes: Lanes

    def part(self, place: Reference, lanes: Lanes) -> Reference:
        """What of the twin is such a part of the array."""
        assert place.array is self.array and lanes == self.lanes
        return Reference(self.other, place.starts, place.sizes, place.kept)


class Asked(NamedTuple):
    """What a kernel asks for.

    Attributes:
      scratch: memory that the warpgroups of a block share, by name.
      arrived: semaphores.
      reached: the names of the arrays that peers store to.
    """

    scratch: dict[str, Any]
    arrived: Any
    reached: list[str]


def asked_for(module: ModuleType, run: Callable[..., None], names: Sequence[str]) -> Asked:
    """What a kernel of a module asks for; its operands and results have names."""
    asked = Asked({}, [], [])

    def get_global(kind: Any) -> Named:
        asked.arrived.append(kind)
        return Named("arrived")

    def meet(words: Any, devices: int, block: int, arrays: Sequence[Named]) -> None:
        asked.reached.extend(array.name for array in arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "block", lambda: (0, 1))
        patch.setattr(module, "Peers", meet)
        patch.setattr(module.pl, "get_global", get_global)
        patch.setattr(module.pl, "run_scoped", lambda _, **memory: asked.scratch.update(memory))
        run(None, *map(Named, names))
    (arrived,) = asked.arrived
    return asked._replace(arrived=arrived)


class Named(SimpleNamespace):
    """An array that has a name and a dtype, and no elements."""

    def __init__(self, name: str):
        super().__init__(name=name, dtype=jnp.bfloat16)
