"""One-shot collectives, simulated: launch after launch in the same workspaces, in any order.

A device begins its next launch when its own blocks have ended, however far its peers are. What is
stored in a peer's memory is seen there late, and in any order but behind what is announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from collective_matmul.kernels import one_shot, workspace
from collective_matmul.kernels.addresses import Address
from collective_matmul.kernels.one_shot import Exchange, Kind
from collective_matmul.kernels.tiles import Tiles
from tests.kernels.simulated_memory import Reference
from tests.kernels.simulation import AXIS, Actor, Simulation

Patch = pytest.MonkeyPatch

BLOCKS = 3
BOX = one_shot._LARGEST_BOX // 2
#: Of the values that are summed: in another order their sum is another.
VALUES = np.array([8192, -8192, 2.0**-14, 1, 3], np.float16)
#: Of every other device the lower half of the address is a negative word.
FIRST_ADDRESS, BETWEEN_ADDRESSES = 0x7FFF_0000_0000, 1 << 31


class Launch(NamedTuple):
    """A collective, and how many boxes each device sends to each peer."""

    kind: Kind
    boxes: int
    delays: bool = False

    @property
    def blocks(self) -> int:
        return min(self.boxes, BLOCKS)


@dataclass(eq=False)
class Message:
    """What was stored in a peer's memory, and is not seen there yet; some is seen before it."""

    place: np.ndarray
    value: np.ndarray
    sender: Actor
    after: Sequence[Message] = field(default=())
    written: bool = False

    def advance(self) -> None:
        if all(message.written for message in self.after):
            self.place[...] = self.value.view(np.uint8)
            self.written = True


class ExchangeSimulation(Simulation):
    """Devices that run the same launches, each with one actor for each of its blocks."""

    def __init__(self, devices: int, launches: Sequence[Launch], seed: int, epoch: int = 0):
        super().__init__(devices, 1, Tiles(), seed)
        self.copies: list[Any]
        self.devices, self.launches = devices, launches
        # Bytes of what is no number.
        self.memory = self.allocate(0xFF, workspace.workspace_bytes(devices), dtype=np.uint8)
        for memory in self.memory:
            words = memory[: workspace.region_offset(devices, 0, 0, 0)].view(np.int32)
            words[:: workspace._WORD_BYTES // 4] = epoch
        draw = np.random.default_rng(seed)
        self.xs, self.ys = [], []
        for kind, boxes, _ in launches:
            whole, part = (devices, devices, boxes, BOX), (devices, boxes, BOX)
            self.xs.append(draw.choice(VALUES, whole if kind == "scatter" else part))
            self.ys.append(np.full(whole if kind == "gather" else part, np.nan, np.float16))
        self.ended: Counter[int] = Counter()
        self.leader = 0
        for device, block in np.ndindex(devices, BLOCKS):
            place = {AXIS: device, "block": block, "launch": 0}
            self.add(place, lambda device=device, block=block: self.serve(device, block))

    def serve(self, device: int, block: int) -> None:
        """All of a block's part, launch by launch."""
        indices = [(device + n) % self.devices for n in range(self.devices)]
        bases = FIRST_ADDRESS + BETWEEN_ADDRESSES * np.array(indices, np.uint64)
        words = [*map(int, bases.view(np.int32)), device]
        for number, (kind, boxes, delays) in enumerate(self.launches):
            before = number * BLOCKS
            self.here().wait(lambda before=before: self.ended[device] >= before)
            if block < self.launches[number].blocks:
                self.here().place["launch"] = number
                x, y = (Reference.to(arrays[number][device]) for arrays in (self.xs, self.ys))
                Exchange(kind, self.devices, boxes, delays).run(words, x, y)
            self.ended[device] += 1

    def choose(self, ready: list[Actor]) -> Actor:
        """Mostly of one device for some time, so that it gets ahead of the others."""
        if self.random.random() < 0.02:
            self.leader = self.random.randrange(self.devices)
        leaders = [actor for actor in ready if actor.place[AXIS] == self.leader]
        return super().choose(leaders if leaders and self.random.random() < 0.9 else ready)

    def end(self, device: int) -> None:
        """What nobody has waited for is seen at some time."""
        while late := [copy for copy in self.copies if copy.sender.place[AXIS] == device]:
            self.advance(self.random.choice(late))

    # The primitives.

    def bytes_at(self, address: Address, count: int) -> tuple[int, np.ndarray]:
        """Whose they are, and they themselves."""
        low, high, offset = address
        assert 0 <= offset < 1 << 31
        where = (low % (1 << 32)) + (high % (1 << 32) << 32) - FIRST_ADDRESS
        device, start = divmod(where, BETWEEN_ADDRESSES)
        assert start == 0 and offset + count <= self.memory[device].size
        return device, self.memory[device][offset : offset + count]

    def load_from(self, address: Address, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        self.here().wait()
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes_at(address, count)[1].view(dtype).reshape(shape).copy()

    def store_at(self, address: Address, value: np.ndarray) -> None:
        self.here().wait()
        self.send(address, value)

    def send(self, address: Address, value: np.ndarray, after: Sequence[Message] = ()) -> None:
        device, place = self.bytes_at(address, value.nbytes)
        message = Message(place, value, self.here(), after)
        if device == self.here().place[AXIS]:
            place[...] = value.view(np.uint8)  # Its own memory a block sees as it left it.
        else:
            self.copies.append(message)

    def word(self, address: Address) -> int:
        return int(self.bytes_at(address, 4)[1].view(np.int32)[0])

    def load_word(self, address: Address) -> int:
        self.here().wait()
        return self.word(address)

    def announce(self, value: int, addresses: Sequence[Address]) -> None:
        self.here().wait()
        before = [message for message in self.copies if message.sender is self.here()]
        for address in addresses:
            self.send(address, np.array([value], np.int64).view(np.int32)[:1], before)

    def await_words(self, value: int, addresses: Sequence[Address]) -> None:
        def arrived(address: Address) -> bool:
            return (self.word(address) - value) % (1 << 32) < 1 << 31

        self.here().wait(lambda: all(map(arrived, addresses)))

    def axis_size(self, axis: str) -> int:
        assert axis == "block"
        return self.launches[self.here().place["launch"]].blocks

    def play(self, monkeypatch: Patch, modules: Sequence[Any] = (one_shot,)) -> None:
        super().play(monkeypatch, modules)
        monkeypatch.setattr(one_shot.lax, "axis_size", self.axis_size)
        monkeypatch.setattr(one_shot, "plgpu", SimpleNamespace(load=read))
        primitives = {
            "layout": lambda shape, dtype: None,
            "load": self.load_from,
            "store": self.store_at,
            "load_word": self.load_word,
            "announce": self.announce,
            "await_words": self.await_words,
            "delays_of": lambda *seed: sum(seed) % 3,
            "delay": lambda times: [self.here().wait() for _ in range(times)],
        }
        for name, played in primitives.items():
            monkeypatch.setattr(one_shot, name, played)

    def assert_results(self) -> None:
        for (kind, *_), xs, ys in zip(self.launches, self.xs, self.ys, strict=True):
            for device, y in enumerate(ys):
                np.testing.assert_array_equal(y, self.expected(kind, xs, device))

    def expected(self, kind: Kind, xs: np.ndarray, device: int) -> np.ndarray:
        if kind == "gather":
            return xs
        if kind == "scatter":
            # In the order of the devices behind this one.
            xs = np.roll(xs[:, device], -device, axis=0)
        total = xs[0].astype(np.float32)
        for x in xs[1:]:
            total += x.astype(np.float32)
        return total.astype(np.float16)


def read(box: Reference, layout: None, optimized: bool) -> np.ndarray:
    assert box.is_within()
    return box.read()


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(workspace, "BLOCKS", BLOCKS)


LAUNCHES = [
    Launch("gather", 2 * BLOCKS),
    Launch("reduce", 1),
    Launch("scatter", BLOCKS + 1),
    Launch("reduce", 2 * BLOCKS - 1, delays=True),
    Launch("reduce", BLOCKS),
    Launch("gather", 2),
    Launch("scatter", 1, delays=True),
    Launch("gather", BLOCKS, delays=True),
]


def run(monkeypatch: Patch, devices: int, seed: int, epoch: int = 0) -> None:
    simulation = ExchangeSimulation(devices, LAUNCHES, seed, epoch)
    simulation.play(monkeypatch)
    simulation.run()
    simulation.assert_results()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_results(devices: int, seed: int, monkeypatch: Patch) -> None:
    run(monkeypatch, devices, seed)


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**31 - 2, 2**31 - 1, -2])
def test_epochs_wrap_around(epoch: int, monkeypatch: Patch) -> None:
    run(monkeypatch, 3, 0, epoch)


def one_slot(monkeypatch: Patch) -> None:
    monkeypatch.setattr(workspace, "SLOTS", 1)


def own_exchanges_are_not_counted(monkeypatch: Patch) -> None:
    announce = one_shot.announce
    monkeypatch.setattr(one_shot, "announce", lambda value, to: announce(value, to[1:]))


def announced_while_it_is_stored(monkeypatch: Patch) -> None:
    send = ExchangeSimulation.send
    monkeypatch.setattr(ExchangeSimulation, "send", lambda *args: send(*args[:3]))


def awaits_the_exchange_before(monkeypatch: Patch) -> None:
    await_words = one_shot.await_words
    monkeypatch.setattr(one_shot, "await_words", lambda value, at: await_words(value - 1, at))


def awaits_some_peers(monkeypatch: Patch) -> None:
    await_words = one_shot.await_words
    monkeypatch.setattr(one_shot, "await_words", lambda value, at: await_words(value, at[1:]))


def devices_in_the_wrong_direction(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Exchange, "device", lambda e, me, number: (me - number) % e.devices)


def sources_share_a_flag(monkeypatch: Patch) -> None:
    flag_offset = workspace.flag_offset
    monkeypatch.setattr(workspace, "flag_offset", lambda source, block: flag_offset(1, block))


def blocks_share_a_flag(monkeypatch: Patch) -> None:
    flag_offset = workspace.flag_offset
    monkeypatch.setattr(workspace, "flag_offset", lambda source, block: flag_offset(source, 0))


def blocks_share_a_region(monkeypatch: Patch) -> None:
    region_offset = workspace.region_offset

    def of_the_first(devices: int, slot: int, source: int, block: int) -> int:
        return region_offset(devices, slot, source, 0)

    monkeypatch.setattr(workspace, "region_offset", of_the_first)


@pytest.mark.parametrize(
    "mistake",
    [
        one_slot,
        own_exchanges_are_not_counted,
        announced_while_it_is_stored,
        awaits_the_exchange_before,
        awaits_some_peers,
        devices_in_the_wrong_direction,
        sources_share_a_flag,
        blocks_share_a_flag,
        blocks_share_a_region,
    ],
)
def test_mistakes_would_show(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with pytest.raises(AssertionError):
        for seed in range(3):
            with monkeypatch.context() as patch:
                simulation = ExchangeSimulation(3, LAUNCHES, seed)
                simulation.play(patch)
                mistake(patch)
                simulation.run()
                simulation.assert_results()
