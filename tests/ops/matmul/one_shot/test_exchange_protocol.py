"""One-shot collectives, simulated: launch after launch in the same workspaces, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP, Address
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited
from collective_matmul.ops.matmul.one_shot import exchange_kernel
from collective_matmul.ops.matmul.one_shot.exchange_kernel import Exchange, Kind
from tests.mosaic_gpu.peers.simulated_workspaces import (
    WorkspaceSimulation,
    as_int32,
    assert_mistake_is_found,
)
from tests.mosaic_gpu.simulated_memory import Reference

Patch = pytest.MonkeyPatch

BLOCKS = 3
BOX = exchange_kernel._LARGEST_BOX // 2
#: Parts of a message that arrive at different times.
PARTS = 2
#: Values to sum. Their float32 sum depends on the order of the terms.
VALUES = np.array([8192, -8192, 2.0**-14, 1, 3], np.float16)


class Launch(NamedTuple):
    """A collective, and how many boxes each device sends to each peer."""

    kind: Kind
    boxes: int
    race_delays: bool = False

    @property
    def blocks(self) -> int:
        return min(self.boxes, BLOCKS)


class ExchangeSimulation(WorkspaceSimulation):
    """Devices that exchange boxes."""

    def __init__(self, devices: int, launches: Sequence[Launch], seed: int, epoch: int = 0):
        super().__init__(devices, BLOCKS, launches, seed, symmetric_workspace.SENTINEL & 0xFF)
        for memory in self.memory:
            words = memory[: symmetric_workspace.region_offset(devices, 0, 0, 0)].view(np.int32)
            words[:: symmetric_workspace._STRIDE_BYTES // 4] = epoch
        draw = np.random.default_rng(seed)
        self.xs, self.ys = [], []
        for kind, boxes, _ in launches:
            whole, part = (devices, devices, boxes, BOX), (devices, boxes, BOX)
            self.xs.append(draw.choice(VALUES, whole if kind == "scatter" else part))
            self.ys.append(np.full(whole if kind == "gather" else part, np.nan, np.float16))

    def take_part(self, words: list[int], number: int, device: int, block: int) -> None:
        launch = self.launches[number]
        if block < launch.blocks:
            x, y = (Reference.to(arrays[number][device]) for arrays in (self.xs, self.ys))
            exchange = Exchange(launch.kind, self.devices, launch.boxes, launch.race_delays)
            exchange.run(words, x, y)

    # The primitives.

    def store_message(self, address: Address, value: np.ndarray) -> None:
        """Stores the parts of a message, which arrive in any order."""
        self.here().wait()
        for number, part in enumerate(np.split(value, PARTS)):
            self.send(address.plus(number * part.nbytes), part)

    def take_message(
        self,
        epoch: int,
        address: Address,
        shape: tuple[int, ...],
        dtype: np.dtype,
        awaited: Awaited,
    ) -> np.ndarray:
        words = self.words_of_message(address, shape, dtype)
        self.assert_reported_here(awaited)
        self.here().wait(lambda: not self.is_missing(words))
        message = words.view(dtype).reshape(shape).copy()
        self.here().wait()
        self.empty(words)
        return message

    def words_of_message(
        self, address: Address, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes_at(address, count)[1].view(np.int32)

    def is_missing(self, words: np.ndarray) -> bool:
        return bool((words == symmetric_workspace.SENTINEL).any())

    def empty(self, words: np.ndarray) -> None:
        words[...] = symmetric_workspace.SENTINEL

    def store_int32(self, address: Address, value: int, scope: Any) -> None:
        assert scope is WARPGROUP
        self.send(address, as_int32(value))

    def axis_size(self, axis: str) -> int:
        assert axis == "block"
        return self.launches[self.here().place["launch"]].blocks

    def play(self, monkeypatch: Patch, modules: Sequence[Any] = (exchange_kernel,)) -> None:
        super().play(monkeypatch, modules)
        monkeypatch.setattr(exchange_kernel.lax, "axis_size", self.axis_size)
        monkeypatch.setattr(exchange_kernel, "plgpu", SimpleNamespace(load=read))
        primitives = {
            "layout": lambda shape, dtype: None,
            "load_int32": self.load_int32,
            "store_int32": self.store_int32,
            "store_message": self.store_message,
            "take_message": self.take_message,
            "race_delay_steps": lambda *seed: sum(seed) % 3,
            "delay_warpgroup": lambda steps: [self.here().wait() for _ in range(steps)],
        }
        for name, played in primitives.items():
            monkeypatch.setattr(exchange_kernel, name, played)

    def assert_results(self) -> None:
        for (kind, *_), xs, ys in zip(self.launches, self.xs, self.ys, strict=True):
            for device, y in enumerate(ys):
                np.testing.assert_array_equal(y, self.expected(kind, xs, device))

    def expected(self, kind: Kind, xs: np.ndarray, device: int) -> np.ndarray:
        if kind == "gather":
            return xs
        if kind == "scatter":
            # In the order of the devices from this one on.
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
    monkeypatch.setattr(symmetric_workspace, "EXCHANGE_BLOCKS", BLOCKS)


LAUNCHES = [
    Launch("gather", 2 * BLOCKS),
    Launch("reduce", 1),
    Launch("scatter", BLOCKS + 1),
    Launch("reduce", 2 * BLOCKS - 1, race_delays=True),
    Launch("reduce", BLOCKS),
    Launch("gather", 2),
    Launch("scatter", 1, race_delays=True),
    Launch("gather", BLOCKS, race_delays=True),
]


def run(monkeypatch: Patch, devices: int, seed: int, epoch: int = 0) -> None:
    simulation = ExchangeSimulation(devices, LAUNCHES, seed, epoch)
    simulation.play(monkeypatch)
    simulation.run()
    simulation.assert_results()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_results_are_right_in_any_order_of_threads(
    devices: int, seed: int, monkeypatch: Patch
) -> None:
    run(monkeypatch, devices, seed)


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**31 - 2, 2**31 - 1, -2])
def test_results_are_right_when_epochs_wrap_around(epoch: int, monkeypatch: Patch) -> None:
    run(monkeypatch, 3, 0, epoch)


def one_phase(monkeypatch: Patch) -> None:
    monkeypatch.setattr(symmetric_workspace, "PHASES", 1)


def own_exchanges_are_not_counted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(exchange_kernel, "store_int32", lambda *_: None)


def messages_are_not_waited_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ExchangeSimulation, "is_missing", lambda *_: False)


def only_the_last_word_is_waited_for(monkeypatch: Patch) -> None:
    is_missing = ExchangeSimulation.is_missing
    monkeypatch.setattr(
        ExchangeSimulation, "is_missing", lambda self, words: is_missing(self, words[-1:])
    )


def taken_messages_stay(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ExchangeSimulation, "empty", lambda *_: None)


def devices_in_the_wrong_direction(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        Exchange, "device_at", lambda e, index, offset: (index - offset) % e.devices
    )


def sources_share_a_region(monkeypatch: Patch) -> None:
    region_offset = symmetric_workspace.region_offset

    def shared(devices: int, phase: int, source: int, block: int) -> int:
        return region_offset(devices, phase, min(source, 1), block)

    monkeypatch.setattr(symmetric_workspace, "region_offset", shared)


def blocks_share_a_region(monkeypatch: Patch) -> None:
    region_offset = symmetric_workspace.region_offset

    def shared(devices: int, phase: int, source: int, block: int) -> int:
        return region_offset(devices, phase, source, 0)

    monkeypatch.setattr(symmetric_workspace, "region_offset", shared)


@pytest.mark.parametrize(
    "mistake",
    [
        one_phase,
        own_exchanges_are_not_counted,
        messages_are_not_waited_for,
        only_the_last_word_is_waited_for,
        taken_messages_stay,
        devices_in_the_wrong_direction,
        sources_share_a_region,
        blocks_share_a_region,
    ],
)
def test_planted_mistakes_are_found(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    assert_mistake_is_found(
        mistake, lambda seed: ExchangeSimulation(3, LAUNCHES, seed), monkeypatch
    )
