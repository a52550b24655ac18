"""The rendezvous protocol, simulated: launch after launch in the same workspaces, in any order.

Every launch has its arrays at other addresses. After `wait_for_peers`, and until the block ends,
`peer_buffer` must return the addresses of this launch. And a peer's arrays must be in use by the
same launch when a block stores to them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers import rendezvous, symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP, Address, ThreadScope
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited
from collective_matmul.mosaic_gpu.peers.rendezvous import MAX_BUFFERS, POINTER_BYTES, Rendezvous
from tests.mosaic_gpu.peers.simulated_workspaces import (
    WorkspaceSimulation,
    as_int32,
    assert_mistake_is_found,
)
from tests.mosaic_gpu.simulation import Actor

Patch = pytest.MonkeyPatch

BLOCKS = 3


class Launch(NamedTuple):
    """A kernel that uses a rendezvous.

    Attributes:
      arrays: number of arrays that peers store to.
      publishing: number of blocks, the first ones, that publish.
      waiting: number of these that wait for their peers, and store to them.
    """

    arrays: int
    publishing: int = BLOCKS
    waiting: int = BLOCKS


class RendezvousSimulation(WorkspaceSimulation):
    """Devices whose blocks find each other's arrays."""

    def __init__(self, devices: int, launches: Sequence[Launch], seed: int, bits: int):
        """Describes the launches.

        Args:
          devices: number of devices.
          launches: the kernels that each of them launches.
          seed: of the order of threads.
          bits: how many bits of the epoch a published word has. Two are enough: the lowest one
            selects the phase.
        """
        super().__init__(devices, BLOCKS, launches, seed, 0)
        self.address_bits = 64 - bits
        # Whether devices are of several processes.
        self.translates = jax.process_count() > 1
        # Number of stores that have arrived, by launch and device.
        self.arrived: Counter[tuple[int, int]] = Counter()
        # Words that may be in the L1 cache.
        self.cached: dict[tuple[Actor, int, Address], int] = {}

    def start_after(self, epoch: int) -> None:
        """Fills the mailboxes with pointers of the last two rendezvous."""
        for memory, block in itertools.product(self.memory, range(BLOCKS)):
            counter = (
                symmetric_workspace.mailbox_offset(self.devices, 0, 0, block)
                + rendezvous._EPOCH_OFFSET
            )
            memory[counter:][:4] = as_int32(epoch).view(np.uint8)
            for published, source in itertools.product((epoch - 1, epoch), range(self.devices)):
                line = symmetric_workspace.mailbox_offset(
                    self.devices, published & 1, source, block
                )
                words = memory[line:][: MAX_BUFFERS * POINTER_BYTES].view(np.uint64)
                words[...] = self.word_with(published, 0)

    def take_part(self, words: list[int], number: int, device: int, block: int) -> None:
        launch = self.launches[number]
        arrays = [address_of(number, device, which) for which in range(launch.arrays)]
        translation = np.array([translation_of(device)], np.uint64).view(np.int32)
        words = [*words, *map(int, translation)]
        mine = Rendezvous(words, self.devices, (block, BLOCKS), arrays, "kernel")
        if block < launch.publishing:
            mine.publish()
        if block < launch.waiting:
            mine.wait_for_peers()
            for offset in range(1, self.devices):
                self.assert_found(mine, number, offset)
                self.store(number, mine.peer_index(offset))
            self.random.shuffle(offsets := list(range(self.devices)))
            for offset in offsets:
                self.assert_found(mine, number, offset)
        # A kernel waits for everything that is stored to it, at least in one of its blocks.
        if block == 0:
            all_blocks = (self.devices - 1) * launch.waiting
            self.here().wait(lambda: self.arrived[number, device] == all_blocks)

    def assert_found(self, mine: Rendezvous, number: int, offset: int) -> None:
        """Asserts that a block finds the arrays of a launch on another device."""
        for which in range(len(mine.arrays)):
            assert mine.peer_buffer(which, offset) == (
                address_of(number, mine.axis_index, which),
                self.address_for_peers(number, mine.peer_index(offset), which)
                if offset
                else address_of(number, mine.axis_index, which),
            )

    def address_for_peers(self, number: int, device: int, which: int) -> int:
        """Returns where peers find an array, which is elsewhere in another process."""
        added = translation_of(device) if self.translates else 0
        return (address_of(number, device, which) + added) % (1 << 64)

    def store(self, number: int, device: int) -> None:
        """Stores something in an array of a launch. It is the launch's own while it runs."""
        assert self.ended[device] // BLOCKS == number
        self.arrived[number, device] += 1

    # The primitives.

    def word_at(self, address: Address) -> int:
        return int(self.bytes_at(address, POINTER_BYTES)[1].view(np.uint64)[0])

    def word_with(self, epoch: int, array: int) -> int:
        """The word of an epoch and an array."""
        assert array < 1 << self.address_bits
        return array | epoch << self.address_bits & (1 << 64) - 1

    def publish_pointers(
        self,
        epoch: int,
        arrays: Sequence[int],
        mailboxes: Sequence[Address],
        scope: ThreadScope,
        translation: Address | None,
    ) -> None:
        assert (translation is not None) == self.translates
        self.here().wait()
        before = self.sent()
        low, high, _ = translation or (0, 0, 0)
        added = low % (1 << 32) + (high % (1 << 32) << 32)
        for place, (number, array) in itertools.product(range(len(mailboxes)), enumerate(arrays)):
            for_peers = (array + added) % (1 << 64) if place else array
            word = np.array([self.word_with(epoch, for_peers)], np.uint64)
            self.send(mailboxes[place].plus(number * POINTER_BYTES), word, before)

    def poll_pointers(
        self,
        epoch: int,
        first: Address,
        stride: int,
        sources: int,
        arrays: int,
        scope: ThreadScope,
        awaited: Awaited,
    ) -> None:
        """Waits for all words. Each lane polls one word, and not again after that has arrived."""
        self.assert_reported_here(awaited)
        missing = {
            first.plus(source * stride + array * POINTER_BYTES)
            for source, array in itertools.product(range(sources), range(arrays))
        }

        def arrived() -> bool:
            found = {a for a in missing if self.word_with(epoch, 0) == self.epoch_at(a)}
            missing.difference_update(found)
            return not missing

        self.here().wait(arrived)

    def load_peer_pointer(self, mailbox: Address) -> int:
        self.here().wait()
        return self.word_at(mailbox) % (1 << self.address_bits)

    def epoch_at(self, address: Address) -> int:
        """The epoch of the word at an address, in the bits of the word."""
        return self.word_at(address) >> self.address_bits << self.address_bits

    def load_int32(self, address: Address, *, cached: bool = False) -> int:
        value = super().load_int32(address)
        if not cached:
            return value
        return self.cached.setdefault((self.here(), self.here().place["launch"], address), value)

    def store_int32(self, address: Address, value: int, scope: ThreadScope = WARPGROUP) -> None:
        self.here().wait()
        self.send(address, as_int32(value))

    def play(self, monkeypatch: Patch, modules: Sequence[Any] = (rendezvous,)) -> None:
        super().play(monkeypatch, modules)
        for name in (
            "publish_pointers",
            "poll_pointers",
            "load_peer_pointer",
            "load_int32",
            "store_int32",
        ):
            monkeypatch.setattr(rendezvous, name, getattr(self, name))


def address_of(launch: int, device: int, which: int) -> int:
    """Returns the address of an array: another one in every launch, on every device."""
    return 0x7F00_0000_0000 + ((launch * 16 + device) * MAX_BUFFERS + which) * 256


def translation_of(device: int) -> int:
    """Returns what is added to addresses of a device, for its peers."""
    return (0x2000_8000_0000 + (device << 40) - 0x7F00_0000_0000) % (1 << 64)


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(symmetric_workspace, "EXCHANGE_BLOCKS", 1)
    monkeypatch.setattr(symmetric_workspace, "RENDEZVOUS_BLOCKS", BLOCKS)


LAUNCHES = [
    Launch(2),
    Launch(3),
    Launch(3, waiting=2),
    Launch(2, publishing=2, waiting=2),
    Launch(2, publishing=1, waiting=1),
    Launch(3, waiting=1),
    Launch(2),
    Launch(3),
    Launch(2, publishing=2, waiting=2),
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
    simulation = RendezvousSimulation(devices, LAUNCHES, seed, bits)
    simulation.play(monkeypatch)
    simulation.run()


@both_bits
@pytest.mark.parametrize(
    "epoch", [2**16 - 4, 2**16 - 3, 2**16 - 2, 2**31 - 4, 2**31 - 3, 2**31 - 2, -4, -3, -2]
)
def test_blocks_find_their_peers_arrays_when_epochs_wrap_around(
    epoch: int, bits: int, monkeypatch: Patch
) -> None:
    simulation = RendezvousSimulation(3, LAUNCHES, 0, bits)
    simulation.start_after(epoch)
    simulation.play(monkeypatch)
    simulation.run()


@pytest.mark.parametrize("devices", [2, 3])
def test_blocks_find_arrays_of_other_processes(devices: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    simulation = RendezvousSimulation(devices, LAUNCHES, 0, 16)
    simulation.play(monkeypatch)
    simulation.run()


def one_phase(monkeypatch: Patch) -> None:
    monkeypatch.setattr(symmetric_workspace, "PHASES", 1)


def epochs_are_not_counted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rendezvous, "store_int32", lambda address, value, scope: None)


def epochs_are_counted_from_cached_words(monkeypatch: Patch) -> None:
    load_int32 = rendezvous.load_int32
    monkeypatch.setattr(
        rendezvous, "load_int32", lambda at, cached=True: load_int32(at, cached=True)
    )


def equal_arrays_are_published_once(monkeypatch: Patch) -> None:
    publish_pointers = rendezvous.publish_pointers

    def publish_each_once(epoch: int, arrays: list[int], *others: Any) -> None:
        publish_pointers(epoch, sorted(set(arrays)), *others)

    monkeypatch.setattr(rendezvous, "publish_pointers", publish_each_once)


def words_are_published_in_halves(monkeypatch: Patch) -> None:
    send = RendezvousSimulation.send

    def send_halves(simulation, address: Address, value: np.ndarray, after=()) -> None:
        for number, half in enumerate(value.view(np.int32)):
            send(simulation, address.plus(4 * number), np.array([half]), after)

    monkeypatch.setattr(RendezvousSimulation, "send", send_halves)


def no_peer_is_waited_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rendezvous, "poll_pointers", lambda *args: None)


def the_previous_epoch_is_waited_for(monkeypatch: Patch) -> None:
    wait_for_peers = Rendezvous.wait_for_peers

    def wait_for_previous_epoch(mine: Rendezvous) -> None:
        mine._epoch -= 1
        wait_for_peers(mine)

    monkeypatch.setattr(Rendezvous, "wait_for_peers", wait_for_previous_epoch)


def only_some_peers_are_waited_for(monkeypatch: Patch) -> None:
    poll_pointers: Any = rendezvous.poll_pointers

    def poll_some(epoch: int, first: Address, stride: int, sources: int, *rest: Any) -> None:
        poll_pointers(epoch, first, stride, sources - 1, *rest)

    monkeypatch.setattr(rendezvous, "poll_pointers", poll_some)


def only_some_arrays_are_waited_for(monkeypatch: Patch) -> None:
    poll_pointers: Any = rendezvous.poll_pointers

    def poll_some(*arguments: Any) -> None:
        *others, arrays, scope, awaited = arguments
        poll_pointers(*others, arrays - 1, scope, awaited)

    monkeypatch.setattr(rendezvous, "poll_pointers", poll_some)


def peers_are_looked_for_in_the_wrong_direction(monkeypatch: Patch) -> None:
    peer_buffer = Rendezvous.peer_buffer
    monkeypatch.setattr(
        Rendezvous, "peer_buffer", lambda mine, n, offset: peer_buffer(mine, n, -offset % 3)
    )


def share(monkeypatch: Patch, **same: int) -> None:
    mailbox_offset = symmetric_workspace.mailbox_offset

    def shared(devices: int, phase: int, source: int, block: int) -> int:
        places = {"phase": phase, "source": source, "block": block} | same
        return mailbox_offset(devices, **places)

    monkeypatch.setattr(symmetric_workspace, "mailbox_offset", shared)


def sources_share_a_mailbox(monkeypatch: Patch) -> None:
    share(monkeypatch, source=0)


def blocks_share_a_mailbox(monkeypatch: Patch) -> None:
    share(monkeypatch, block=0)


@pytest.mark.parametrize(
    "mistake",
    [
        one_phase,
        epochs_are_not_counted,
        epochs_are_counted_from_cached_words,
        equal_arrays_are_published_once,
        words_are_published_in_halves,
        no_peer_is_waited_for,
        the_previous_epoch_is_waited_for,
        only_some_peers_are_waited_for,
        only_some_arrays_are_waited_for,
        peers_are_looked_for_in_the_wrong_direction,
        sources_share_a_mailbox,
        blocks_share_a_mailbox,
    ],
)
def test_planted_mistakes_are_found(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    assert_mistake_is_found(
        mistake, lambda seed: RendezvousSimulation(3, LAUNCHES, seed, 2), monkeypatch
    )
