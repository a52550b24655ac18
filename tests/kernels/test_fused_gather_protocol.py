"""The protocol of the kernel that gathers and multiplies, played by threads in any order.

The kernel's own code for its senders and producers runs here, on Python numbers: only the
primitives are played. One thread acts at a time, drawn at random after each primitive. A copy takes
place at any moment from when it was issued to when it was waited for, so that a wait that is
missing, or counts too little, shows as rows that have not arrived, or a box overwritten too early;
one that counts too much, as a deadlock.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.kernels import gather_kernel, matmul_kernel, operands, peers
from collective_matmul.kernels.gather_kernel import Gathering
from collective_matmul.kernels.gather_plan import BUFFERS, Plan, Shapes
from collective_matmul.kernels.tiles import Problem, Tiles

AXIS = "ring"
NEVER = np.nan


class Reference:
    """A region of memory."""

    def __init__(self, array: np.ndarray, index: Any = ...):
        self.array, self.index = array, index
        self.view = array[index]

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Reference:
        assert self.index is ...
        return Reference(self.array, index)


class Barriers:
    """Barriers in shared memory, each of one arrival."""

    def __init__(self, count: int):
        self.arrivals, self.waits = [0] * count, [0] * count

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: int) -> tuple[Barriers, int]:
        return self, index


@dataclass
class Copy:
    """A copy under way: it reads its source, and later writes its destination."""

    source: np.ndarray
    destination: np.ndarray
    arrive: Callable[[], None]
    value: np.ndarray | None = None
    written: bool = False

    def advance(self) -> None:
        if self.value is None:
            self.value = self.source.copy()
        else:
            self.destination[...] = self.value
            self.written = True
            self.arrive()


@dataclass
class Actor(threading.Thread):
    """A warp: it acts when it is its turn, and can go on when its condition holds."""

    simulation: Simulation
    place: dict[str, int]
    act: Callable[[], None]
    ready: Callable[[], bool] = field(default=lambda: True)
    groups: list[list[Copy]] = field(default_factory=lambda: [[]])
    stored_at: list[int] = field(default_factory=list)
    failure: BaseException | None = None

    def __post_init__(self):
        super().__init__(daemon=True)
        self.turn = threading.Semaphore(0)
        self.ended = False

    __hash__ = object.__hash__

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.act()
        except BaseException as error:
            self.failure = error
        self.ended = True
        self.simulation.scheduler.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Hands over; goes on at some time when `ready()`."""
        self.ready = ready
        self.simulation.scheduler.release()
        self.turn.acquire()


class Simulation:
    """Devices along one axis, each with a few blocks of a sender and a producer."""

    def __init__(self, plan: Plan, keep: bool, blocks: int, seed: int):
        self.plan, self.keep, self.blocks = plan, keep, blocks
        self.random = random.Random(seed)
        # Of copies: low, and they take place as late as waits allow.
        self.eagerness = (0.5, 0.1, 0.0)[seed]
        self.scheduler = threading.Semaphore(0)
        self.copies: list[Copy] = []
        shapes, problem = plan.shapes, plan.shapes.problem(plan.joins)
        draw = np.random.default_rng(seed).standard_normal
        shape = shapes.planes, shapes.devices, shapes.rows, shapes.contracted
        whole = draw(shape)
        self.shards = [whole[:, d] for d in range(shapes.devices)]
        self.expected = whole.reshape(problem.batch, problem.rows, shapes.contracted)
        self.gathered = [np.full_like(self.expected, NEVER) for _ in self.shards]
        count = shapes.planes * shapes.devices * plan.groups
        self.semaphores = [np.zeros(count, int) for _ in self.shards]
        self.multiplied = [Counter() for _ in self.shards]
        self.actors = [
            Actor(self, place, act)
            for place in self.places()
            for act in (self.sender(place[AXIS]), self.producer(place[AXIS]))
        ]

    def places(self) -> list[dict[str, int]]:
        down, across = self.plan.tiles.cluster
        self.sizes = {
            AXIS: self.plan.shapes.devices,
            "cluster": self.blocks // (down * across),
            "block_down": down,
            "block_across": across,
        }
        shape = tuple(self.sizes.values())
        return [dict(zip(self.sizes, map(int, p), strict=True)) for p in np.ndindex(shape)]

    def work(self) -> Gathering:
        problem = self.plan.shapes.problem(self.plan.joins)
        arrays = [SimpleNamespace(shape=(problem.batch, problem.rows, n)) for n in problem.columns]
        weights = [SimpleNamespace(shape=(1, *_weight(problem, n))) for n in problem.columns]
        gathered = SimpleNamespace(shape=(problem.batch, problem.rows, *problem.contracted))
        return Gathering(self.plan, AXIS, self.keep, False, gathered, weights, arrays)

    def sender(self, device: int) -> Callable[[], None]:
        def act() -> None:
            boxes = Reference(np.full((BUFFERS, *self.plan.box), NEVER))
            loaded = Barriers(BUFFERS)
            self.work().send(
                Reference(self.shards[device]),
                Reference(self.gathered[device]),
                Reference(self.semaphores[device]),
                boxes,
                loaded,
            )

        return act

    def producer(self, device: int) -> Callable[[], None]:
        def act() -> None:
            work = self.work()
            shard, gathered = self.shards[device], self.gathered[device]
            x = Reference(shard), Reference(gathered), Reference(self.semaphores[device])
            ws = [Reference(np.empty((1, 1, 1 + q))) for q in range(work.results)]

            def visit(turn, batch, row, across):
                def load(first, steps, read_x, read_w, stages):
                    plane = work.out_plane(None, batch)
                    rows = self.expected[plane, row : row + self.plan.tiles.rows]
                    along = slice(0, self.plan.shapes.contracted)
                    self.here().wait(lambda: True)
                    np.testing.assert_array_equal(read_x(0, along).view, rows)
                    w = read_w(0, slice(0, 1))
                    self.multiplied[device][plane, row, w.array.shape[2] - 1, w.index[2].start] += 1

                work.load = load
                indices = [0] * (work.results + 2)
                work.load_tile((indices, x, [ws]), None, turn, batch, row, across)

            work.walk(visit)

        return act

    def device_of(self, region: np.ndarray) -> int:
        """Whose gathered array a region is of."""
        return next(d for d, whole in enumerate(self.gathered) if np.shares_memory(whole, region))

    def here(self) -> Actor:
        actor = threading.current_thread()
        assert isinstance(actor, Actor)
        return actor

    def run(self) -> None:
        """Lets actors act and copies take place until all have ended."""
        for actor in self.actors:
            actor.start()
        while running := [a for a in self.actors if not a.ended]:
            ready = [a for a in running if a.ready()]
            assert ready or self.copies, "deadlock"
            if self.copies and (not ready or self.random.random() < self.eagerness):
                self.advance(self.random.choice(self.copies))
                continue
            chosen = self.random.choice(ready)
            chosen.turn.release()
            self.scheduler.acquire()
            if chosen.failure is not None:
                raise chosen.failure
        assert not self.copies, "a kernel ended before its copies"

    def advance(self, copy: Copy) -> None:
        copy.advance()
        if copy.written:
            self.copies = [c for c in self.copies if c is not copy]

    def issue(
        self, source: Reference, destination: Reference, arrive: Callable = lambda: None
    ) -> Copy:
        self.here().wait(lambda: True)
        copy = Copy(source.view, destination.view, arrive)
        self.copies.append(copy)
        return copy

    def signal(self, semaphore: Reference, device_id: dict[str, int] | None = None) -> None:
        actor = self.here()
        actor.wait(lambda: True)
        device = {**actor.place, **(device_id or {})}[AXIS]
        self.semaphores[device][semaphore.index] += 1

    def play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts what actors do in the place of the primitives of the kernel's modules."""

        def loop(start: int, stop: int) -> Callable:
            return lambda body: [body(i) for i in range(start, stop)]

        def walk(grid: tuple[int], *, collective_axes: str) -> Callable:
            first, step = self.here().place[collective_axes], self.sizes[collective_axes]
            info = (
                SimpleNamespace(index=(i,), local_index=turn)
                for turn, i in enumerate(range(first, *grid, step))
            )
            return lambda body: [body(i) for i in info]

        def load(source: Reference, box: Reference, barrier: tuple[Barriers, int]) -> None:
            barriers, slot = barrier

            def arrive() -> None:
                barriers.arrivals[slot] += 1

            self.issue(source, box, arrive)

        def store(box: Reference, place: Reference, commit_group: bool) -> None:
            assert not commit_group
            copy = self.issue(box, place)
            self.here().groups[-1].append(copy)
            self.here().stored_at.append(self.device_of(copy.destination))

        def commit() -> None:
            self.here().groups.append([])

        def wait_for_stores(most: int, wait_read_only: bool = False) -> None:
            committed = self.here().groups[:-1]
            copies = [c for group in committed[: len(committed) - most] for c in group]
            if wait_read_only:
                self.here().wait(lambda: all(c.value is not None for c in copies))
            else:
                self.here().wait(lambda: all(c.written for c in copies))

        def wait_for_load(barrier: tuple[Barriers, int]) -> None:
            barriers, slot = barrier
            barriers.waits[slot] += 1
            self.here().wait(lambda: barriers.arrivals[slot] >= barriers.waits[slot])

        def await_semaphore(semaphore: Reference, count: int, decrement: bool) -> None:
            assert not decrement
            self.here().wait(lambda: bool(semaphore.array[semaphore.index] >= count))

        primitives = {
            "pl": {
                "ds": lambda start, size: slice(start, start + size),
                "cdiv": lambda a, b: -(-a // b),
                "when": lambda condition: lambda body: body() if condition else None,
                "loop": loop,
                "semaphore_signal": self.signal,
                "semaphore_wait": await_semaphore,
            },
            "plgpu": {
                "nd_loop": walk,
                "planar_snake": _snake,
                "copy_gmem_to_smem": load,
                "copy_smem_to_gmem": store,
                "commit_smem_to_gmem_group": commit,
                "wait_smem_to_gmem": wait_for_stores,
                "barrier_wait": wait_for_load,
                "async_prefetch": lambda _: None,
                "remote_ref": lambda _, device: Reference(self.gathered[device[AXIS]]),
            },
            "lax": {
                "axis_index": lambda axis: self.here().place[axis],
                "axis_size": lambda axis: self.sizes[axis],
                "div": lambda a, b: a // b,
                "rem": lambda a, b: a % b,
            },
            "jnp": {"int32": int, "minimum": min},
        }
        for module in (gather_kernel, matmul_kernel, operands, peers):
            for name, played in primitives.items():
                monkeypatch.setattr(module, name, SimpleNamespace(**played), raising=False)


@functools.cache
def _snake(*arguments: Any) -> tuple[int, ...]:
    return tuple(map(int, mosaic_gpu.planar_snake(*arguments)))


def _weight(problem: Problem, columns: int) -> tuple[int, ...]:
    shape = *problem.contracted, columns
    return shape if problem.w_contracted == 1 else shape[::-1]


LOW = Tiles(64, 64, split="columns", swizzle=64, share=None, sweep="columns", sweep_width=2)
HIGH = replace(LOW, rows=128, columns=128, split="rows", share="w")

PLANS = {
    "one tile to a shard": Plan(Shapes(2, 1, 64, 64, (64,)), LOW, False, (16, 32), 1),
    "messages of several boxes": Plan(Shapes(3, 1, 136, 128, (192,)), LOW, False, (8, 32), 2),
    "clusters, strips across groups": Plan(
        Shapes(2, 2, 200, 64, (128, 64)), HIGH, False, (40, 64), 1
    ),
    "clusters along the columns": Plan(
        Shapes(4, 1, 40, 64, (192,)), replace(HIGH, share="x"), False, (8, 64), 1
    ),
    "joins": Plan(Shapes(4, 2, 4, 64, (128,)), LOW, True, (4, 32), 2),
    "joins, several tiles": Plan(Shapes(3, 1, 48, 64, (64,)), LOW, True, (16, 64), 1),
    "joins, clusters": Plan(Shapes(3, 1, 104, 64, (64,)), HIGH, True, (8, 64), 1),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_row_is_here_when_it_is_multiplied(
    plan: Plan, seed: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(plan, keep, 2, seed)
    simulation.play(monkeypatch)
    simulation.run()
    tiles, problem = plan.tiles, plan.shapes.problem(plan.joins)
    for device, multiplied in enumerate(simulation.multiplied):
        visits = {key for key in multiplied if key[1] < problem.rows}
        assert set(multiplied.values()) == {1}
        assert {key[:3] for key in visits} == {
            (plane, row, q)
            for plane in range(problem.batch)
            for row in range(0, problem.rows, tiles.rows)
            for q in range(len(problem.columns))
        }
        if keep or plan.joins:
            np.testing.assert_array_equal(simulation.gathered[device], simulation.expected)


@pytest.mark.parametrize("name", ["messages of several boxes", "clusters along the columns"])
def test_the_device_that_needs_a_shard_first_gets_it_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name]
    simulation = Simulation(plan, False, 2, 0)
    simulation.play(monkeypatch)
    simulation.run()
    devices = plan.shapes.devices
    senders = [actor for actor in simulation.actors if actor.stored_at]
    assert len(senders) == 2 * devices
    for sender in senders:
        # Device d multiplies the shards of d, d + 1, d + 2 and so on.
        order = [(sender.place[AXIS] - later) % devices for later in range(1, devices)]
        assert list(dict.fromkeys(sender.stored_at)) == order
        assert sender.stored_at == sorted(sender.stored_at, key=order.index)
