"""The kernel that multiplies and sums over devices, simulated: its sums are right in any order."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.backends.fused import owner_tile_scheduler, reduce_scatter_kernel
from collective_matmul.backends.fused.owner_tile_scheduler import Strips
from collective_matmul.backends.fused.reduce_scatter import in_rows
from collective_matmul.backends.fused.reduce_scatter_config import Plan, Shapes
from collective_matmul.backends.fused.reduce_scatter_kernel import Scattering
from collective_matmul.mosaic_gpu import matmul_kernel
from collective_matmul.mosaic_gpu.matmul_kernel import Work
from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP
from collective_matmul.mosaic_gpu.tiling import CONSUMERS, Tiles
from tests.mosaic_gpu.simulated_memory import Barriers, Image, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous, requested_resources
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation

MODULES = reduce_scatter_kernel, owner_tile_scheduler, matmul_kernel
NEVER = np.nan


class ScatterSimulation(Simulation):
    """Blocks of a producer and its consumers."""

    def __init__(self, plan: Plan, clusters: int, seed: int):
        shapes = plan.shapes
        super().__init__(shapes.devices, clusters, plan.tiles, seed)
        self.plan = plan
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
        width = plan.tiles.strip_columns
        blocked = shapes.columns // width, shapes.rows, width
        if shapes.kind == "two_step":
            results = shapes.planes * shapes.devices, *blocked
        else:
            results = shapes.planes, shapes.rows, shapes.columns
        self.ys = self.allocate(NEVER, *results, dtype=np.float32)
        sources = shapes.planes * plan.sources
        self.partials = self.allocate(NEVER, sources, *blocked, dtype=np.float32)
        terms = [name for name in ("x", "w") for _ in shapes.contracted]
        self.requested = requested_resources(
            reduce_scatter_kernel, self.work(0).run, [*terms, "y", "partials"]
        )
        self.semaphores = self.allocate(0, *self.requested.arrived.shape, dtype=int)
        # The results, and what peers had stored, as they were when each kernel ended.
        self.kept: dict[int, np.ndarray] = {}
        self.received: dict[int, np.ndarray] = {}
        # Of a cluster, since a stage is free when all its blocks have let it go.
        arrivals = CONSUMERS * math.prod(plan.tiles.cluster)
        consumed = defaultdict(lambda: Barriers(plan.tiles.stages, arrivals))
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        shared = {"y": self.ys, "partials": self.partials, "arrived": self.semaphores}
        for place in self.places():
            arrays = [shared[name] for name in self.requested.reached]
            rendezvous = SimulatedRendezvous(self, place, others, arrays, WARPGROUP)
            self.add_block(place, consumed[place[AXIS], place["cluster"]], rendezvous)

    def work(self, device: int) -> Scattering:
        return Scattering(self.plan, False, self.xs[device], self.ws[device])

    def add_block(
        self, place: dict[str, int], consumed: Barriers, rendezvous: SimulatedRendezvous
    ) -> None:
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
        strip = tiles.rows, tiles.strip_columns
        incoming = Reference.to(stages[0].array.reshape(tiles.stages, -1, *strip))
        strips = memory(CONSUMERS, tiles.strips, tiles.part[0], tiles.strip_columns)
        strips = Strips(strips, Image.of(strips, tiles.swizzle))
        xs, ws = ([Reference.to(a) for a in arrays[device]] for arrays in (self.xs, self.ws))
        results = self.ys, self.partials, self.semaphores
        y, partials, arrived = (Reference.to(arrays[device]) for arrays in results)

        met = Barriers(1, self.requested.scratch["met"].num_arrivals).at[0]

        def work() -> Scattering:
            made = self.work(device)
            # What is made in `run`.
            made.incoming = Strips(incoming, Image.of(incoming, tiles.swizzle))
            made.rendezvous, made.met = rendezvous, met
            return made

        def produce() -> None:
            operands = [0] * (2 * len(xs)), (xs, partials, arrived), [[w] for w in ws]
            work().produce(operands, stages)

        def consume(consumer: int) -> Callable[[], None]:
            return lambda: work().consume(None, consumer, stages, strips, (y, partials, arrived))

        for act in (produce, *map(consume, range(CONSUMERS))):
            self.add(place, act)

    def end(self, device: int) -> None:
        plan = self.plan
        expected = plan.sources * CONSUMERS
        assert set(self.semaphores[device][: plan.own_tiles]) <= {0, expected}
        self.received[device] = self.partials[device].copy()
        y = self.ys[device]
        blocked = plan.shapes.kind == "two_step"
        self.kept[device] = (
            np.array(in_rows(jnp.asarray(y), plan.tiles.swizzle)) if blocked else y.copy()
        )
        super().end(device)

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
    "two steps, half a swizzle": Plan(
        Shapes("two_step", 2, 1, 64, (96,), 128), replace(WIDE, swizzle=64)
    ),
    "shared tiles, half a swizzle": Plan(
        Shapes("scatter", 4, 1, 16, (96,), 128), replace(LOW, swizzle=64)
    ),
    "one shot, few rows": Plan(Shapes("one_shot", 3, 1, 24, (64,), 128), LOW),
    "narrow strips": Plan(
        Shapes("one_shot", 2, 1, 40, (320,), 192), replace(LOW, columns=64, swizzle=64)
    ),
    "narrow strips, half a tile beyond the end": Plan(
        Shapes("scatter", 2, 1, 32, (64,), 160), replace(LOW, columns=64, swizzle=64)
    ),
    "three strips, own tiles in a row": Plan(
        Shapes("scatter", 2, 2, 128, (64,), 192), replace(WIDE, columns=192, strips=3)
    ),
    "seven strips, two steps": Plan(
        Shapes("two_step", 2, 1, 256, (64,), 448), replace(WIDE, columns=224, strips=7, swizzle=64)
    ),
    "narrow strips, two steps": Plan(
        Shapes("two_step", 3, 1, 32, (64,), 160), replace(LOW, columns=64, swizzle=64)
    ),
    "one shot": Plan(Shapes("one_shot", 3, 1, 72, (64,), 192), WIDE),
    "one shot, several tiles, clusters": Plan(
        Shapes("one_shot", 2, 1, 136, (64,), 128), replace(LOW, share="w")
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sums(plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.fits()
    simulation = ScatterSimulation(plan, 2, seed)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    for device in range(plan.shapes.devices):
        np.testing.assert_array_equal(simulation.kept[device], simulation.expected(device))


def test_products_are_added_in_the_order_of_the_devices_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLANS["whole tiles"]
    devices, rows = plan.shapes.devices, plan.shapes.rows
    simulation = ScatterSimulation(plan, 2, 0)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    for device in range(devices):
        blocks = np.empty_like(simulation.received[device])
        Image.of(Reference.to(blocks), plan.tiles.swizzle).write(simulation.received[device])
        received = blocks.swapaxes(1, 2).reshape(plan.sources, rows, plan.shapes.columns)
        mine = slice(device * rows, (device + 1) * rows)
        for source in range(plan.sources):
            sender = (device + 1 + source) % devices
            product = simulation.xs[sender][0][0, mine] @ simulation.ws[sender][0][0]
            np.testing.assert_array_equal(received[source], product)


def test_a_tile_is_sent_strip_by_strip_while_the_next_is_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLANS["more steps than stores take"]
    # One block has both tiles, the peer's and its own.
    simulation = ScatterSimulation(plan, 1, 0)
    multiplied: Counter[Actor] = Counter()
    stored = defaultdict(list)
    start = simulation.start

    def multiply(work, accumulator, turn, x, w, stages, steps):
        Work.multiply(work, accumulator, turn, x, w, stages, steps)
        multiplied[simulation.here()] += len(range(*steps))

    def note(*copy):
        stored[simulation.here()].append(multiplied[simulation.here()])
        start(*copy)

    monkeypatch.setattr(Scattering, "multiply", multiply)
    monkeypatch.setattr(simulation, "start", note)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    assert len(stored) == plan.shapes.devices * CONSUMERS
    for steps in stored.values():
        first, second, *sums = steps
        assert 10 < first < second < 20
        assert sums == [20, 20]


def test_a_tile_that_is_sent_needs_all_its_strips() -> None:
    plan = PLANS["whole tiles"]
    assert not replace(plan, tiles=replace(plan.tiles, strips=1)).fits()
