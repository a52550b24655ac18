"""Simulated kernels that use symmetric workspaces, launch after launch, in any order.

A device starts its next launch when its own blocks have ended, however far its peers are. A store
to a peer's memory is seen there late, and in any order, except that a signal is seen after the
stores before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import Address
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation

#: Of every other address the lower word is negative.
_FIRST_ADDRESS, _BETWEEN_ADDRESSES = 0x7FFF_0000_0000, 1 << 31


@dataclass(eq=False)
class Message:
    """A store to a peer's memory that is not seen there yet; it is seen after those in `after`."""

    place: np.ndarray
    value: np.ndarray
    sender: Actor
    after: Sequence[Message] = field(default=())
    written: bool = False

    def advance(self) -> None:
        if all(message.written for message in self.after):
            self.place[...] = self.value.view(np.uint8)
            self.written = True


class WorkspaceSimulation(Simulation, ABC):
    """Devices that run the same launches, each with one actor for each of its blocks."""

    def __init__(self, devices: int, blocks: int, launches: Sequence[Any], seed: int, byte: int):
        """Adds the actors. All bytes of the workspaces are `byte` at first."""
        super().__init__(devices, 1, Tiling(), seed)
        self.copies: list[Any]
        self.devices, self.blocks, self.launches = devices, blocks, launches
        size = symmetric_workspace.workspace_bytes(devices)
        self.memory = [np.full(size, byte, np.uint8) for _ in range(devices)]
        self.ended: Counter[int] = Counter()
        self.leader = 0
        for device, block in np.ndindex(devices, blocks):
            place = {AXIS: device, "block": block, "launch": 0}
            self.add(place, lambda device=device, block=block: self.serve(device, block))

    def serve(self, device: int, block: int) -> None:
        """Executes a block's part of all launches."""
        indices = [(device + n) % self.devices for n in range(self.devices)]
        bases = _FIRST_ADDRESS + _BETWEEN_ADDRESSES * np.array(indices, np.uint64)
        words = [*map(int, bases.view(np.int32)), device]
        for number in range(len(self.launches)):
            before = number * self.blocks
            self.here().wait(lambda before=before: self.ended[device] >= before)
            self.here().place["launch"] = number
            self.take_part(words, number, device, block)
            self.ended[device] += 1

    @abstractmethod
    def take_part(self, words: list[int], number: int, device: int, block: int) -> None:
        """Executes a block's part of a launch; words: see `workspace_pointers`."""

    def choose(self, ready: list[Actor]) -> Actor:
        """Prefers one device for some time, so that it gets ahead of the others."""
        if self.random.random() < 0.02:
            self.leader = self.random.randrange(self.devices)
        leaders = [actor for actor in ready if actor.place[AXIS] == self.leader]
        return super().choose(leaders if leaders and self.random.random() < 0.9 else ready)

    def end(self, device: int) -> None:
        """Makes the device's stores that nobody has waited for visible, in random order."""
        while late := [copy for copy in self.copies if copy.sender.place[AXIS] == device]:
            self.advance(self.random.choice(late))

    def assert_results(self) -> None:
        """Checks the results of the launches, when all have ended; some check them earlier."""

    # The primitives.

    def bytes_at(self, address: Address, count: int) -> tuple[int, np.ndarray]:
        """Returns the device that an address is on, and the bytes at the address."""
        low, high, offset = address
        assert 0 <= offset < 1 << 31
        where = (low % (1 << 32)) + (high % (1 << 32) << 32) - _FIRST_ADDRESS
        device, start = divmod(where, _BETWEEN_ADDRESSES)
        assert start == 0 and offset + count <= self.memory[device].size
        return device, self.memory[device][offset : offset + count]

    def assert_reported_here(self, awaited: Awaited) -> None:
        """Asserts that a wait that takes too long is reported in the workspace of its device."""
        device, _ = self.bytes_at(awaited.report, symmetric_workspace.REPORT_BYTES)
        assert device == self.here().place[AXIS]
        assert awaited.report.offset == symmetric_workspace.report_offset(self.devices)

    def send(self, address: Address, value: np.ndarray, after: Sequence[Message] = ()) -> None:
        device, place = self.bytes_at(address, value.nbytes)
        message = Message(place, value, self.here(), after)
        if device == self.here().place[AXIS]:
            place[...] = value.view(np.uint8)  # A block sees its own stores at once.
        else:
            self.copies.append(message)

    def sent(self) -> list[Message]:
        """Returns the stores of this block that peers do not see yet."""
        return [message for message in self.copies if message.sender is self.here()]

    def word(self, address: Address) -> int:
        return int(self.bytes_at(address, 4)[1].view(np.int32)[0])

    def load_int32(self, address: Address) -> int:
        self.here().wait()
        return self.word(address)


def assert_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None],
    simulate: Callable[[int], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asserts that one of the simulations, one for each seed, fails after a mistake was planted."""
    with pytest.raises(AssertionError):
        for seed in range(3):
            with monkeypatch.context() as patch:
                simulation = simulate(seed)
                simulation.play(patch)
                mistake(patch)
                simulation.run()
                simulation.assert_results()


def assert_initial(words: np.ndarray, devices: int) -> None:
    """Asserts that regions of a workspace are ready for messages, and all before them is zero.

    Of what follows them, that is all but the report.
    """
    phases = symmetric_workspace.PHASES
    first, end = (symmetric_workspace.region_offset(devices, p, 0, 0) // 4 for p in (0, phases))
    assert (words[first:end] == symmetric_workspace.SENTINEL).all()
    assert not words[:first].any() and not words[end:-2].any()


def as_int32(value: int) -> np.ndarray:
    """Returns a value as an int32 that has wrapped around."""
    return np.array([value], np.int64).view(np.int32)[:1]
