"""A simulator of Mosaic GPU kernels: the threads of several devices, in any order, on NumPy arrays.

The kernel's own code runs here, on Python numbers. Only the primitives of Pallas are replaced. An
actor is a warp or a warpgroup. One actor runs at a time; the next one is drawn at random at each
primitive. A copy happens at any moment between its start and the wait for it. So a wait that is
missing, or waits for too little, shows as a wrong value. A wait for too much shows as a deadlock.

Devices start their kernels at different times. Before the start and after the end of a kernel,
nobody may touch its memory.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import BLOCK_AXES
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from tests.mosaic_gpu.simulated_memory import Barriers, Copy, Reference

AXIS = "ring"


@dataclass(eq=False)
class Actor(threading.Thread):
    """A warp or a warpgroup. It runs when the simulation chooses it, which it may if it is `ready`.

    Attributes:
      simulation: that it is part of.
      place: the device, the cluster and the block, as indices along their axes.
      act: the code that it executes.
      ready: whether it can go on.
      groups: its copies to global memory; the last group is not committed yet.
      failure: the exception that ended it.
    """

    simulation: Simulation
    place: dict[str, int]
    act: Callable[[], None]
    ready: Callable[[], bool] = field(default=lambda: True)
    groups: list[list[Copy]] = field(default_factory=lambda: [[]])
    failure: BaseException | None = None

    def __post_init__(self):
        super().__init__(daemon=True)
        self.chosen = threading.Semaphore(0)
        self.ended = False

    def run(self) -> None:
        self.chosen.acquire()
        try:
            self.act()
        except BaseException as error:
            self.failure = error
        self.ended = True
        self.simulation.scheduler.release()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run. Goes on at some time when `ready()` holds."""
        self.ready = ready
        self.simulation.scheduler.release()
        self.chosen.acquire()


class Simulation:
    """Devices along `AXIS`, each with some clusters of blocks. Subclasses add the actors."""

    def __init__(self, devices: int, clusters: int, tiling: Tiling, seed: int):
        axes = AXIS, "cluster", *BLOCK_AXES
        sizes = devices, clusters, *tiling.cluster
        self.sizes: dict[str, int] = dict(zip(axes, sizes, strict=True))
        self.random = random.Random(seed)
        # Probability of a copy at each step. If it is low, copies are as late as waits allow.
        self.eagerness = (0.5, 0.1, 0.0)[seed]
        # Probability of a start at each step. If it is low, devices start when nobody can go on.
        self.haste = (0.0, 0.02, 0.2)[seed]
        self.scheduler = threading.Semaphore(0)
        self.copies: list[Copy] = []
        self.actors: list[Actor] = []
        self.started: set[int] = set()
        # The arrays of all devices, and their value before and after the kernels.
        self.allocated: list[tuple[list[np.ndarray], Any]] = []

    def add(self, place: dict[str, int], act: Callable[[], None]) -> None:
        """Adds an actor."""
        self.actors.append(Actor(self, place, act))

    def places(self) -> list[dict[str, int]]:
        """Grid indices of all blocks."""
        indices = np.ndindex(*self.sizes.values())
        return [dict(zip(self.sizes, map(int, index), strict=True)) for index in indices]

    def allocate(self, value: Any, *shape: int, dtype: type = float) -> list[np.ndarray]:
        """Returns an array for each device, filled with a value. It belongs to the kernel."""
        arrays = [np.full(shape, value, dtype) for _ in range(self.sizes[AXIS])]
        self.allocated.append((arrays, value))
        return arrays

    def start_kernel(self, device: int) -> None:
        """Starts a device's kernel."""
        self.assert_untouched(device)
        self.started.add(device)

    def end(self, device: int) -> None:
        """Ends a device's kernel: its memory is used for something else."""
        for arrays, value in self.allocated:
            arrays[device][...] = value

    def assert_untouched(self, device: int) -> None:
        """Asserts that nobody has written to a device's arrays while no kernel has them."""
        for arrays, value in self.allocated:
            np.testing.assert_array_equal(arrays[device], value)

    def run(self) -> None:
        """Runs actors and copies until all have ended."""
        for actor in self.actors:
            actor.start()
        late = list(range(self.sizes[AXIS]))
        while running := [actor for actor in self.actors if not actor.ended]:
            ready = [a for a in running if a.place[AXIS] in self.started and a.ready()]
            assert ready or self.copies or late, "deadlock"
            if late and (not (ready or self.copies) or self.random.random() < self.haste):
                self.start_kernel(late.pop(self.random.randrange(len(late))))
                continue
            if self.copies and (not ready or self.random.random() < self.eagerness):
                self.advance(self.random.choice(self.copies))
                continue
            actor = self.choose(ready)
            actor.chosen.release()
            self.scheduler.acquire()
            if actor.failure is not None:
                raise actor.failure
            device = actor.place[AXIS]
            if all(actor.ended for actor in self.actors if actor.place[AXIS] == device):
                self.end(device)
        assert not self.copies, "a kernel ended before its copies"
        for device in self.started:
            self.assert_untouched(device)

    def choose(self, ready: list[Actor]) -> Actor:
        """Returns the actor that runs next."""
        return self.random.choice(ready)

    def advance(self, copy: Copy) -> None:
        """Makes a copy read its source, or else write its destination."""
        copy.advance()
        if copy.written:
            self.copies.remove(copy)

    def here(self) -> Actor:
        """Returns the actor that is running."""
        actor = threading.current_thread()
        assert isinstance(actor, Actor)
        return actor

    # The primitives.

    def nd_loop(self, grid: tuple[int], *, collective_axes: str) -> Callable:
        first, step = self.here().place[collective_axes], self.sizes[collective_axes]
        infos = [
            SimpleNamespace(index=(index,), local_index=local_index)
            for local_index, index in enumerate(range(first, *grid, step))
        ]
        return lambda body: _for_each(body, infos)

    def load(
        self,
        source: Reference,
        box: Reference,
        barrier: tuple[Barriers, int],
        collective_axes: str | None = None,
        oob_mode: Any = None,
    ) -> None:
        # In the simulation every block loads all that it needs; nothing is out of bounds.
        del oob_mode
        if collective_axes is not None:
            # On a GPU each block loads a part for all of them, which consists of whole swizzles.
            assert box.shape[0] % (8 * self.sizes[collective_axes]) == 0
        self.here().wait()
        self.copies.append(Copy(source, box, functools.partial(_arrive, *barrier)))

    def store(
        self, box: Reference, place: Reference, predicate: bool = True, commit_group: bool = True
    ) -> None:
        self.start(box, place, predicate)
        if commit_group:
            self.commit()

    def start(self, box: Reference, place: Reference, predicate: bool) -> None:
        """Starts to copy a box to a place in global memory, if the predicate holds."""
        self.here().wait()
        if predicate:
            # TMA may not know the end of the columns.
            assert place.starts[-1] < place.array.shape[-1]
            copy = Copy(box, place)
            self.copies.append(copy)
            self.here().groups[-1].append(copy)

    def commit(self) -> None:
        self.here().groups.append([])

    def wait_for_stores(self, most: int, wait_read_only: bool = False) -> None:
        committed = self.here().groups[:-1]
        copies = [copy for group in committed[: len(committed) - most] for copy in group]
        if wait_read_only:
            self.here().wait(lambda: all(copy.value is not None for copy in copies))
        else:
            self.here().wait(lambda: all(copy.written for copy in copies))

    def barrier_wait(self, barrier: tuple[Barriers, int]) -> None:
        barriers, index = barrier
        key = self.here(), index
        barriers.waits[key] = phase = barriers.waits.get(key, 0) + 1
        self.here().wait(lambda: barriers.arrivals[index] >= phase * barriers.num_arrivals)

    def barrier_arrive(self, barrier: tuple[Barriers, int]) -> None:
        self.here().wait()
        _arrive(*barrier)

    def async_remote_store(
        self, box: Reference, place: Reference, peer_buffer: Any, *conditions: bool, scope: Any
    ) -> None:
        there = peer_buffer.part(place, scope)
        assert box.shape == there.shape
        # A plain bulk copy does not know where arrays end.
        assert not all(conditions) or (box.is_one_piece() and there.is_one_piece())
        self.start(box, there, all(conditions))

    def signal_peers(self, semaphore: Reference, peer_buffers: Sequence[Any], scope: Any) -> None:
        self.here().wait()
        for peer_buffer in peer_buffers:
            there = peer_buffer.part(semaphore, scope)
            there.array[there.starts] += 1

    def wait_for_count(self, semaphore: Reference, count: int) -> None:
        self.here().wait(lambda: bool(semaphore.array[semaphore.starts] >= count))

    def axis_index(self, axis: str) -> int:
        assert axis != AXIS, "a kernel that asks XLA for its device is prepared by the host"
        return self.here().place[axis]

    def play(self, monkeypatch: pytest.MonkeyPatch, modules: Sequence[ModuleType]) -> None:
        """Replaces the primitives in the modules of a kernel by those of the simulation."""
        primitives = {
            "pl": {
                "ds": lambda start, size: slice(start, start + size),
                "cdiv": lambda a, b: -(-a // b),
                "when": lambda condition: lambda body: body() if condition else None,
                "loop": lambda start, stop: functools.partial(_for_each, values=range(start, stop)),
                "run_scoped": lambda body, accumulator: body(accumulator),
            },
            "plgpu": {
                "OOBFillMode": SimpleNamespace(PROMISE_IN_BOUNDS=None),
                "ACC": lambda shape, dtype: Reference.to(np.zeros(shape, dtype)),
                "nd_loop": self.nd_loop,
                "planar_snake": _snake,
                "copy_gmem_to_smem": self.load,
                "copy_smem_to_gmem": self.store,
                "commit_smem_to_gmem_group": self.commit,
                "wait_smem_to_gmem": self.wait_for_stores,
                "commit_smem": _nothing,
                "barrier_wait": self.barrier_wait,
                "barrier_arrive": self.barrier_arrive,
                "wgmma": _wgmma,
                "wgmma_wait": _nothing,
                "async_prefetch": _nothing,
            },
            "lax": {
                "axis_index": self.axis_index,
                "axis_size": lambda axis: self.sizes[axis],
                "div": lambda a, b: a // b,
                "rem": lambda a, b: a % b,
                "fori_loop": _fori_loop,
            },
            "jnp": {
                "int32": int,
                "float32": np.float32,
                "maximum": max,
                "minimum": min,
                "logical_not": lambda x: not x,
                "where": lambda condition, a, b: a if condition else b,
            },
        }
        own = {
            "async_remote_store": self.async_remote_store,
            "signal_peers": self.signal_peers,
            "wgmma_fence": _nothing,
        }
        for module in modules:
            for name, played in primitives.items():
                monkeypatch.setattr(module, name, SimpleNamespace(**played), raising=False)
            for name, played in own.items():
                monkeypatch.setattr(module, name, played, raising=False)


def play_scales(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Replaces what the multiplication in 8 bits needs beside the primitives of a simulation."""
    layout = SimpleNamespace(WGMMA=SimpleNamespace(reduce=lambda dimension: None))
    monkeypatch.setattr(module.plgpu, "Layout", layout, raising=False)
    monkeypatch.setattr(module.plgpu, "layout_cast", lambda x, layout: x, raising=False)
    # Of arrays, in place of those of numbers.
    for name in ("zeros", "minimum", "maximum", "finfo"):
        monkeypatch.setattr(module.jnp, name, getattr(np, name), raising=False)
    monkeypatch.setattr(module, "load_in_layout", lambda ref, layout: ref.read())

    def broadcast_in_dim(x: np.ndarray, shape: tuple[int, ...], dimensions: tuple[int]) -> Any:
        assert len(x) == shape[dimensions[0]]
        return x[:, None] if dimensions == (0,) else x[None]

    monkeypatch.setattr(module.lax, "broadcast_in_dim", broadcast_in_dim, raising=False)


def _for_each(body: Callable, values: Sequence[Any]) -> None:
    for value in values:
        body(value)


def _fori_loop(start: int, stop: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
    return functools.reduce(lambda carry, step: body(step, carry), range(start, stop), carry)


def _arrive(barriers: Barriers, index: int) -> None:
    barriers.arrivals[index] += 1


def _wgmma(accumulator: Reference, x: Reference, w: Reference) -> None:
    accumulator[...] = accumulator[...] + x.read() @ w.read()


def _nothing(*_: Any, **__: Any) -> None:
    pass


@functools.cache
def _snake(*arguments: Any) -> tuple[int, ...]:
    return tuple(map(int, mosaic_gpu.planar_snake(*arguments)))
