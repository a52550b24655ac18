"""The kernel that multiplies and sums over devices, played by threads in any order, with numbers.

The kernel's own code runs here on NumPy arrays, for several devices: only the primitives are
played. One warpgroup acts at a time, drawn at random after each primitive. A copy takes place at
any moment from when it was issued to when it was waited for. So a wait that is missing, or counts
too little, shows as a wrong sum; one that counts too much, as a deadlock.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.kernels import matmul_kernel, peers, scatter_kernel, scatter_walk
from collective_matmul.kernels.scatter_kernel import Scattering
from collective_matmul.kernels.scatter_plan import Plan, Shapes
from collective_matmul.kernels.tiles import CONSUMERS, Tiles

AXIS = "ring"
NEVER = np.nan


class Reference:
    """A region of memory. It may reach beyond the end of the array, as what is copied may."""

    dtype = np.dtype(np.float32)

    def __init__(self, array: np.ndarray, starts: tuple, sizes: tuple, kept: tuple):
        self.array, self.starts, self.sizes, self.kept = array, starts, sizes, kept

    @classmethod
    def to(cls, array: np.ndarray) -> Reference:
        return cls(array, (0,) * array.ndim, array.shape, tuple(range(array.ndim)))

    @property
    def at(self) -> Any:
        return _At(self)

    def region(self, index: Any) -> Reference:
        starts, sizes, kept = list(self.starts), list(self.sizes), []
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.kept) - len(index))
        for dimension, part in zip(self.kept, index, strict=True):
            if isinstance(part, slice):
                begin = part.start or 0
                end = sizes[dimension] if part.stop is None else part.stop
                kept.append(dimension)
            else:
                begin, end = part, part + 1
            starts[dimension] += begin
            sizes[dimension] = end - begin
        return Reference(self.array, tuple(starts), tuple(sizes), tuple(kept))

    def transpose(self, order: tuple[int, ...]) -> Reference:
        return Reference(
            self.array, self.starts, self.sizes, tuple(self.kept[dimension] for dimension in order)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[dimension] for dimension in self.kept)

    def _within(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the region is in the array: there, and in a value of the region."""
        bounds = [
            (start, max(start, min(start + size, end)))
            for start, size, end in zip(self.starts, self.sizes, self.array.shape, strict=True)
        ]
        assert all(start >= 0 for start in self.starts)
        there = tuple(slice(*bound) for bound in bounds)
        return there, tuple(slice(0, end - start) for start, end in bounds)

    def read(self) -> np.ndarray:
        value = np.zeros(self.sizes, np.float32)
        there, here = self._within()
        value[here] = self.array[there]
        dropped = tuple(d for d in range(value.ndim) if d not in self.kept)
        order = np.argsort(np.argsort(self.kept))
        return np.squeeze(value, dropped).transpose(order)

    def write(self, value: np.ndarray) -> None:
        dropped = tuple(d for d in range(self.array.ndim) if d not in self.kept)
        there, here = self._within()
        self.array[there] = np.expand_dims(value, dropped)[here]

    def __getitem__(self, index: Any) -> np.ndarray:
        return (self if index is ... else self.region(index)).read()

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        (self if index is ... else self.region(index)).write(value)


class _At:
    def __init__(self, reference: Any):
        self.reference = reference

    def __getitem__(self, index: Any) -> Any:
        return self.reference.region(index)


class Barriers:
    """Barriers in shared memory; those of a cluster are the same object for all its blocks."""

    def __init__(self, count: int, num_arrivals: int):
        self.num_arrivals = num_arrivals
        self.arrivals = [0] * count
        self.waits: dict[tuple[Any, int], int] = {}

    @property
    def at(self) -> Any:
        return _At(self)

    def region(self, index: int) -> tuple[Barriers, int]:
        return self, index


@dataclass(eq=False)
class Copy:
    """A copy under way: it reads its source, and later writes its destination."""

    source: Reference
    destination: Reference
    arrive: Callable[[], None] = lambda: None
    value: np.ndarray | None = None
    written: bool = False

    def advance(self) -> None:
        if self.value is None:
            self.value = self.source.read()
        else:
            self.destination.write(self.value)
            self.written = True
            self.arrive()


@dataclass(eq=False)
class Warpgroup(threading.Thread):
    """It acts when it is its turn, and can go on when its condition holds."""

    simulation: Simulation
    place: dict[str, int]
    act: Callable[[], None]
    ready: Callable[[], bool] = field(default=lambda: True)
    groups: list[list[Copy]] = field(default_factory=lambda: [[]])
    failure: BaseException | None = None

    def __post_init__(self):
        super().__init__(daemon=True)
        self.turn = threading.Semaphore(0)
        self.ended = False

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.act()
        except BaseException as error:
            self.failure = error
        self.ended = True
        self.simulation.scheduler.release()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Hands over; goes on at some time when `ready()`."""
        self.ready = ready
        self.simulation.scheduler.release()
        self.turn.acquire()


class Simulation:
    """Devices along one axis, each with a few blocks."""

    def __init__(self, plan: Plan, clusters: int, seed: int):
        self.plan, shapes = plan, plan.shapes
        self.random = random.Random(seed)
        # Of copies: low, and they take place as late as waits allow.
        self.eagerness = (0.5, 0.1, 0.0)[seed]
        self.scheduler = threading.Semaphore(0)
        self.copies: list[Copy] = []
        draw = np.random.default_rng(seed).integers
        # Products and sums of small whole numbers are exact, in any order.
        self.xs, self.ws = (
            [
                [draw(-3, 4, (planes, *sizes(k))).astype(np.float32) for k in shapes.contracted]
                for _ in range(shapes.devices)
            ]
            for planes, sizes in (
                (shapes.planes, lambda k: (shapes.all_rows, k)),
                (1, lambda k: (k, shapes.columns)[:: 1 if shapes.w_contracted == 1 else -1]),
            )
        )
        results = shapes.planes * (shapes.devices if shapes.kind == "two_step" else 1)

        def empty(planes: int) -> list[np.ndarray]:
            shape = planes, shapes.rows, shapes.columns
            return [np.full(shape, NEVER, np.float32) for _ in range(shapes.devices)]

        self.ys, self.partials = empty(results), empty(shapes.planes * plan.sources)
        self.semaphores = [np.zeros(plan.own_tiles + 1) for _ in range(shapes.devices)]
        down, across = plan.tiles.cluster
        self.sizes = {
            AXIS: shapes.devices,
            "cluster": clusters,
            "block_down": down,
            "block_across": across,
        }
        self.warpgroups: list[Warpgroup] = []
        for device, cluster in np.ndindex(shapes.devices, clusters):
            # Of a cluster, since a stage is free when all its blocks have let it go.
            stages = plan.tiles.stages
            consumed = Barriers(stages, CONSUMERS * down * across)
            for block in np.ndindex(down, across):
                place = dict(zip(self.sizes, map(int, (device, cluster, *block)), strict=True))
                self.warpgroups += self.block(place, consumed)

    def block(self, place: dict[str, int], consumed: Barriers) -> list[Warpgroup]:
        tiles, shapes, device = self.plan.tiles, self.plan.shapes, place[AXIS]

        def memory(*shape: int) -> Reference:
            return Reference.to(np.full(shape, NEVER, np.float32))

        w_slice = (tiles.contracted, tiles.columns)[:: 1 if shapes.w_contracted == 1 else -1]
        stages = (
            memory(tiles.stages, tiles.rows, tiles.contracted),
            memory(tiles.stages, *w_slice),
            Barriers(tiles.stages, 2),
            consumed,
        )
        strips = memory(CONSUMERS, tiles.strips, tiles.part[0], tiles.strip_columns)
        xs, ws = ([Reference.to(a) for a in arrays[device]] for arrays in (self.xs, self.ws))
        y, partials = (Reference.to(arrays[device]) for arrays in (self.ys, self.partials))
        arrived = Reference.to(self.semaphores[device])

        def work() -> Scattering:
            made = Scattering(self.plan, AXIS, False, self.xs[device], self.ws[device])
            made.peers = [peers.peer(AXIS, offset) for offset in range(shapes.devices)]
            return made

        def produce() -> None:
            work().produce(
                ([0] * (2 * len(xs)), (xs, partials, arrived), [[w] for w in ws]), stages
            )

        def consume(consumer: int) -> Callable[[], None]:
            return lambda: work().consume(None, consumer, stages, strips, (y, partials, arrived))

        acts = [produce, *map(consume, range(CONSUMERS))]
        return [Warpgroup(self, place, act) for act in acts]

    def here(self) -> Warpgroup:
        warpgroup = threading.current_thread()
        assert isinstance(warpgroup, Warpgroup)
        return warpgroup

    def run(self) -> None:
        """Lets warpgroups act and copies take place until all have ended."""
        for warpgroup in self.warpgroups:
            warpgroup.start()
        while running := [w for w in self.warpgroups if not w.ended]:
            ready = [w for w in running if w.ready()]
            assert ready or self.copies, "deadlock"
            if self.copies and (not ready or self.random.random() < self.eagerness):
                copy = self.random.choice(self.copies)
                copy.advance()
                if copy.written:
                    self.copies.remove(copy)
                continue
            chosen = self.random.choice(ready)
            chosen.turn.release()
            self.scheduler.acquire()
            if chosen.failure is not None:
                raise chosen.failure
            device = chosen.place[AXIS]
            if all(w.ended for w in self.warpgroups if w.place[AXIS] == device):
                self.end(device)
        assert not self.copies, "a kernel ended before its copies"

    def end(self, device: int) -> None:
        """What comes after a kernel: its memory is used for something else."""
        plan = self.plan
        expected = plan.sources * CONSUMERS
        assert set(self.semaphores[device][: plan.own_tiles]) <= {0, expected}
        self.partials[device][...] = NEVER
        self.kept[device] = self.ys[device].copy()
        self.ys[device][...] = NEVER

    @functools.cached_property
    def kept(self) -> dict[int, np.ndarray]:
        """The results, as they were when each kernel ended."""
        return {}

    def expected(self, device: int) -> np.ndarray:
        shapes = self.plan.shapes
        transpose = shapes.w_contracted == 2
        products = [
            x @ (w[0].T if transpose else w[0])
            for xs, ws in zip(self.xs, self.ws, strict=True)
            for x, w in zip(xs, ws, strict=True)
        ]
        product = np.sum(products, axis=0)
        if shapes.kind == "one_shot":
            return product
        by_owner = product.reshape(shapes.planes, shapes.devices, shapes.rows, shapes.columns)
        if shapes.kind == "scatter":
            return by_owner[:, device]
        return by_owner.reshape(-1, shapes.rows, shapes.columns)

    def play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts what warpgroups do in the place of the primitives of the kernel's modules."""

        def run_scoped(body: Callable, accumulator: tuple[int, int]) -> None:
            body(Reference.to(np.zeros(accumulator, np.float32)))

        def loop(start: int, stop: int) -> Callable:
            return lambda body: [body(i) for i in range(start, stop)] and None

        def walk(grid: tuple[int], *, collective_axes: str) -> Callable:
            first, step = self.here().place[collective_axes], self.sizes[collective_axes]
            turns = range(len(range(first, *grid, step)))
            return lambda body: [body(SimpleNamespace(local_index=turn)) for turn in turns]

        def load(source, box, barrier, collective_axes=None) -> None:
            del collective_axes  # Every block loads all that it needs.
            barriers, slot = barrier
            self.here().wait()

            def arrive() -> None:
                barriers.arrivals[slot] += 1

            self.copies.append(Copy(source, box, arrive))

        def store(box, place, predicate: bool, commit_group: bool) -> None:
            self.here().wait()
            if predicate:
                # The copy engine may not see an end of the columns.
                assert place.starts[-1] < place.array.shape[-1]
                copy = Copy(box, place)
                self.copies.append(copy)
                self.here().groups[-1].append(copy)
            if commit_group:
                self.here().groups.append([])

        def wait_for_stores(most: int, wait_read_only: bool = False) -> None:
            committed = self.here().groups[:-1]
            copies = [c for group in committed[: len(committed) - most] for c in group]
            if wait_read_only:
                self.here().wait(lambda: all(c.value is not None for c in copies))
            else:
                self.here().wait(lambda: all(c.written for c in copies))

        def wait(barrier: tuple[Barriers, int]) -> None:
            barriers, slot = barrier
            key = self.here(), slot
            barriers.waits[key] = phase = barriers.waits.get(key, 0) + 1
            self.here().wait(lambda: barriers.arrivals[slot] >= phase * barriers.num_arrivals)

        def arrive(barrier: tuple[Barriers, int]) -> None:
            barriers, slot = barrier
            self.here().wait()
            barriers.arrivals[slot] += 1

        def signal(semaphore: Reference, device_id: dict[str, int]) -> None:
            self.here().wait()
            self.semaphores[device_id[AXIS]][semaphore.starts[0]] += 1

        def await_semaphore(semaphore: Reference, count: int, decrement: bool) -> None:
            assert not decrement
            self.here().wait(lambda: bool(semaphore.read() >= count))

        def wgmma(accumulator: Reference, x: Reference, w: Reference) -> None:
            accumulator[...] = accumulator[...] + x.read() @ w.read()

        def remote(ref: Reference, device: dict[str, int]) -> Reference:
            mine = self.here().place[AXIS]
            arrays = self.ys if ref.array is self.ys[mine] else self.partials
            return Reference.to(arrays[device[AXIS]])

        nothing = lambda *_, **__: None  # noqa: E731
        primitives = {
            "pl": {
                "ds": lambda start, size: slice(start, start + size),
                "cdiv": lambda a, b: -(-a // b),
                "when": lambda condition: lambda body: body() if condition else None,
                "loop": loop,
                "run_scoped": run_scoped,
                "semaphore_signal": signal,
                "semaphore_wait": await_semaphore,
            },
            "plgpu": {
                "ACC": lambda shape, dtype: shape,
                "nd_loop": walk,
                "planar_snake": _snake,
                "copy_gmem_to_smem": load,
                "copy_smem_to_gmem": store,
                "wait_smem_to_gmem": wait_for_stores,
                "commit_smem": nothing,
                "barrier_wait": wait,
                "barrier_arrive": arrive,
                "wgmma": wgmma,
                "wgmma_wait": nothing,
                "remote_ref": remote,
            },
            "lax": {
                "axis_index": lambda axis: self.here().place[axis],
                "axis_size": lambda axis: self.sizes[axis],
                "div": lambda a, b: a // b,
                "rem": lambda a, b: a % b,
            },
            "jnp": {
                "float32": np.float32,
                "maximum": max,
                "minimum": min,
                "logical_not": lambda x: not x,
                "where": lambda condition, a, b: a if condition else b,
            },
        }
        for module in (scatter_kernel, scatter_walk, matmul_kernel, peers):
            for name, played in primitives.items():
                monkeypatch.setattr(module, name, SimpleNamespace(**played), raising=False)


@functools.cache
def _snake(*arguments: Any) -> tuple[int, ...]:
    return tuple(map(int, mosaic_gpu.planar_snake(*arguments)))


WIDE = Tiles(128, 128, stages=3, strips=2, share=None, sweep_width=2)
LOW = replace(WIDE, rows=64, split="columns", strips=1)

PLANS = {
    "whole tiles": Plan(Shapes("scatter", 3, 1, 256, (64,), 192), WIDE),
    "more steps than stores take": Plan(Shapes("scatter", 2, 1, 128, (640,), 128), WIDE),
    "several terms, planes, transposed": Plan(
        Shapes("scatter", 2, 2, 64, (64, 128), 128, w_contracted=2), LOW
    ),
    "clusters along the rows": Plan(
        Shapes("scatter", 3, 1, 256, (64,), 128), replace(WIDE, share="w")
    ),
    "clusters along the columns": Plan(
        Shapes("scatter", 2, 1, 64, (64,), 320), replace(LOW, share="x")
    ),
    "tiles shared by all": Plan(Shapes("scatter", 4, 2, 16, (64,), 192), WIDE),
    "tiles shared by two": Plan(Shapes("scatter", 3, 1, 64, (128,), 192), WIDE),
    "clusters shared by four": Plan(
        Shapes("scatter", 3, 1, 64, (64,), 128), replace(WIDE, share="w")
    ),
    "a strip beyond the end": Plan(Shapes("scatter", 2, 1, 8, (64,), 64), WIDE),
    "two steps": Plan(Shapes("two_step", 3, 1, 128, (64,), 192), WIDE),
    "two steps, shared tiles": Plan(Shapes("two_step", 3, 1, 32, (64,), 128), LOW),
    "one shot": Plan(Shapes("one_shot", 3, 1, 72, (64,), 192), WIDE),
    "one shot, several tiles, clusters": Plan(
        Shapes("one_shot", 2, 1, 136, (64,), 128), replace(LOW, share="w")
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sums(plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.fits()
    simulation = Simulation(plan, 2, seed)
    simulation.play(monkeypatch)
    simulation.run()
    for device in range(plan.shapes.devices):
        np.testing.assert_array_equal(simulation.kept[device], simulation.expected(device))
