"""How blocks meet, simulated: launch after launch in the same workspaces, in any order.

Every launch has its arrays elsewhere. Blocks that have had their peers come must find those of this
launch until they end, and find them in use when they store something there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from collective_matmul.mosaic_gpu import rendezvous, workspace
from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP, Address, Lanes
from collective_matmul.mosaic_gpu.rendezvous import MOST_ARRAYS, SAID_BYTES, Peers
from tests.mosaic_gpu.simulated_workspaces import WorkspaceSimulation, as_int32, assert_it_shows
from tests.mosaic_gpu.simulation import Actor

Patch = pytest.MonkeyPatch

BLOCKS = 3


class Launch(NamedTuple):
    """A kernel in which blocks meet.

    Attributes:
      arrays: that peers store to.
      announcing: so many of the blocks, the first, tell where the arrays are.
      awaiting: so many of these wait for their peers, and store to them.
    """

    arrays: int
    announcing: int = BLOCKS
    awaiting: int = BLOCKS


class MeetingSimulation(WorkspaceSimulation):
    """Devices whose blocks look for each other's arrays.

    Of the epoch, words have so many bits as given. Two are enough: one is the slot's.
    """

    def __init__(self, devices: int, launches: Sequence[Launch], seed: int, bits: int):
        super().__init__(devices, BLOCKS, launches, seed, 0)
        self.address_bits = 64 - bits
        # How often something has come, by the launch and the device.
        self.came: Counter[tuple[int, int]] = Counter()
        # Words that a multiprocessor may have kept.
        self.settled: dict[tuple[Actor, int, Address], int] = {}

    def begin_behind(self, epoch: int) -> None:
        """All that was said at the last two meetings is there still."""
        for memory, block in itertools.product(self.memory, range(BLOCKS)):
            counter = (
                workspace.meeting_offset(self.devices, 0, 0, block) + rendezvous._COUNTER_OFFSET
            )
            memory[counter:][:4] = as_int32(epoch).view(np.uint8)
            for said, source in itertools.product((epoch - 1, epoch), range(self.devices)):
                line = workspace.meeting_offset(self.devices, said & 1, source, block)
                words = memory[line:][: MOST_ARRAYS * SAID_BYTES].view(np.uint64)
                words[...] = self.said_with(said, 0)

    def take_part(self, words: list[int], number: int, device: int, block: int) -> None:
        launch = self.launches[number]
        arrays = [address_of(number, device, which) for which in range(launch.arrays)]
        peers = Peers(words, self.devices, (block, BLOCKS), arrays)
        if block < launch.announcing:
            peers.announce()
        if block < launch.awaiting:
            peers.await_all()
            for offset in range(1, self.devices):
                self.assert_found(peers, number, offset)
                self.store(number, peers.index(offset))
            self.random.shuffle(offsets := list(range(self.devices)))
            for offset in offsets:
                self.assert_found(peers, number, offset)
        # A kernel waits for all that comes, at least in one of its blocks.
        if block == 0:
            all_blocks = (self.devices - 1) * launch.awaiting
            self.here().wait(lambda: self.came[number, device] == all_blocks)

    def assert_found(self, peers: Peers, number: int, offset: int) -> None:
        """That a block finds the arrays of a launch on another device."""
        for which in range(len(peers.arrays)):
            assert peers.twin(which, offset) == (
                address_of(number, peers.me, which),
                address_of(number, peers.index(offset), which),
            )

    def store(self, number: int, device: int) -> None:
        """A block stores something in an array of a launch, which is its own while it runs."""
        assert self.ended[device] // BLOCKS == number
        self.came[number, device] += 1

    # The primitives.

    def said(self, address: Address) -> int:
        return int(self.bytes_at(address, SAID_BYTES)[1].view(np.uint64)[0])

    def said_with(self, epoch: int, array: int) -> int:
        """The word that has both."""
        assert array < 1 << self.address_bits
        return array | epoch << self.address_bits & (1 << 64) - 1

    def say(
        self, value: int, arrays: Sequence[int], addresses: Sequence[Address], lanes: Lanes
    ) -> None:
        self.here().wait()
        before = self.sent()
        for address, (number, array) in itertools.product(addresses, enumerate(arrays)):
            word = np.array([self.said_with(value, array)], np.uint64)
            self.send(address.behind(number * SAID_BYTES), word, before)

    def hear(
        self, value: int, first: Address, between: int, count: int, arrays: int, lanes: Lanes
    ) -> None:
        """Each lane waits for its own word, and no longer looks at it when that has come."""
        missing = {
            first.behind(who * between + which * SAID_BYTES)
            for who, which in itertools.product(range(count), range(arrays))
        }

        def heard() -> bool:
            found = {a for a in missing if self.said_with(value, 0) == self.epoch_at(a)}
            missing.difference_update(found)
            return not missing

        self.here().wait(heard)

    def load_said(self, place: Address) -> int:
        self.here().wait()
        return self.said(place) % (1 << self.address_bits)

    def epoch_at(self, address: Address) -> int:
        """With which an address was said, where a word has it."""
        return self.said(address) >> self.address_bits << self.address_bits

    def load_word(self, address: Address, *, settled: bool = False) -> int:
        value = super().load_word(address)
        if not settled:
            return value
        return self.settled.setdefault((self.here(), self.here().place["launch"], address), value)

    def store_word(self, address: Address, value: int, lanes: Lanes = WARPGROUP) -> None:
        self.here().wait()
        self.send(address, as_int32(value))

    def play(self, monkeypatch: Patch, modules: Sequence[Any] = (rendezvous,)) -> None:
        super().play(monkeypatch, modules)
        for name in ("say", "hear", "load_said", "load_word", "store_word"):
            monkeypatch.setattr(rendezvous, name, getattr(self, name))


def address_of(launch: int, device: int, which: int) -> int:
    """Arrays are elsewhere in every launch, on every device."""
    return 0x7F00_0000_0000 + ((launch * 16 + device) * MOST_ARRAYS + which) * 256


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(workspace, "BLOCKS", 1)
    monkeypatch.setattr(workspace, "MEETING_BLOCKS", BLOCKS)


LAUNCHES = [
    Launch(2),
    Launch(3),
    Launch(3, awaiting=2),
    Launch(2, announcing=2, awaiting=2),
    Launch(2, announcing=1, awaiting=1),
    Launch(3, awaiting=1),
    Launch(2),
    Launch(3),
    Launch(2, announcing=2, awaiting=2),
    Launch(2),
    Launch(3),
]

both_bits = pytest.mark.parametrize("bits", [16, 2])


@both_bits
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_blocks_find_their_peers_arrays(
    devices: int, seed: int, bits: int, monkeypatch: Patch
) -> None:
    simulation = MeetingSimulation(devices, LAUNCHES, seed, bits)
    simulation.play(monkeypatch)
    simulation.run()


@both_bits
@pytest.mark.parametrize(
    "epoch", [2**16 - 4, 2**16 - 3, 2**16 - 2, 2**31 - 4, 2**31 - 3, 2**31 - 2, -4, -3, -2]
)
def test_epochs_wrap_around(epoch: int, bits: int, monkeypatch: Patch) -> None:
    simulation = MeetingSimulation(3, LAUNCHES, 0, bits)
    simulation.begin_behind(epoch)
    simulation.play(monkeypatch)
    simulation.run()


def one_slot(monkeypatch: Patch) -> None:
    monkeypatch.setattr(workspace, "SLOTS", 1)


def meetings_are_not_counted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rendezvous, "store_word", lambda address, value, lanes: None)


def they_are_counted_from_what_is_kept(monkeypatch: Patch) -> None:
    load_word = rendezvous.load_word
    monkeypatch.setattr(
        rendezvous, "load_word", lambda at, settled=True: load_word(at, settled=True)
    )


def no_more_words_are_said_than_there_are_arrays(monkeypatch: Patch) -> None:
    say = rendezvous.say

    def say_them(value: int, arrays: list[int], addresses: list[Address], lanes: Lanes) -> None:
        say(value, sorted(set(arrays)), addresses, lanes)

    monkeypatch.setattr(rendezvous, "say", say_them)


def words_are_said_in_halves(monkeypatch: Patch) -> None:
    send = MeetingSimulation.send

    def send_halves(simulation, address: Address, value: np.ndarray, after=()) -> None:
        for number, half in enumerate(value.view(np.int32)):
            send(simulation, address.behind(4 * number), np.array([half]), after)

    monkeypatch.setattr(MeetingSimulation, "send", send_halves)


def nobody_is_awaited(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rendezvous, "hear", lambda *args: None)


def the_meeting_before_is_awaited(monkeypatch: Patch) -> None:
    await_all = Peers.await_all

    def await_before(peers: Peers) -> None:
        peers._epoch -= 1
        await_all(peers)

    monkeypatch.setattr(Peers, "await_all", await_before)


def some_peers_are_awaited(monkeypatch: Patch) -> None:
    hear: Any = rendezvous.hear

    def hear_some(value: int, first: Address, between: int, count: int, *rest: Any) -> None:
        hear(value, first, between, count - 1, *rest)

    monkeypatch.setattr(rendezvous, "hear", hear_some)


def some_arrays_are_awaited(monkeypatch: Patch) -> None:
    hear: Any = rendezvous.hear

    def hear_some(*facts: Any) -> None:
        *others, arrays, lanes = facts
        hear(*others, arrays - 1, lanes)

    monkeypatch.setattr(rendezvous, "hear", hear_some)


def peers_are_looked_for_in_the_wrong_direction(monkeypatch: Patch) -> None:
    twin = Peers.twin
    monkeypatch.setattr(Peers, "twin", lambda peers, n, offset: twin(peers, n, -offset % 3))


def share(monkeypatch: Patch, **same: int) -> None:
    meeting_offset = workspace.meeting_offset

    def shared(devices: int, slot: int, source: int, block: int) -> int:
        places = {"slot": slot, "source": source, "block": block} | same
        return meeting_offset(devices, **places)

    monkeypatch.setattr(workspace, "meeting_offset", shared)


def sources_share_a_line(monkeypatch: Patch) -> None:
    share(monkeypatch, source=0)


def blocks_share_a_line(monkeypatch: Patch) -> None:
    share(monkeypatch, block=0)


@pytest.mark.parametrize(
    "mistake",
    [
        one_slot,
        meetings_are_not_counted,
        they_are_counted_from_what_is_kept,
        no_more_words_are_said_than_there_are_arrays,
        words_are_said_in_halves,
        nobody_is_awaited,
        the_meeting_before_is_awaited,
        some_peers_are_awaited,
        some_arrays_are_awaited,
        peers_are_looked_for_in_the_wrong_direction,
        sources_share_a_line,
        blocks_share_a_line,
    ],
)
def test_mistakes_would_show(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    assert_it_shows(mistake, lambda seed: MeetingSimulation(3, LAUNCHES, seed, 2), monkeypatch)
