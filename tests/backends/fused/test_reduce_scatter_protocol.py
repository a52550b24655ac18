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
from collective_matmul.backends.fused.reduce_scatter_config import (
    ReduceScatterConfig,
    ReduceScatterProblem,
)
from collective_matmul.backends.fused.reduce_scatter_kernel import Scattering
from collective_matmul.mosaic_gpu import matmul_kernel
from collective_matmul.mosaic_gpu.matmul_kernel import Work
from collective_matmul.mosaic_gpu.peer_memory import WARPGROUP
from collective_matmul.mosaic_gpu.tiling import CONSUMERS, Tiling
from tests.mosaic_gpu.simulated_memory import Barriers, Image, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous, requested_resources
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation

MODULES = reduce_scatter_kernel, owner_tile_scheduler, matmul_kernel
NEVER = np.nan


class ScatterSimulation(Simulation):
    """Blocks of a producer and its consumers."""

    def __init__(self, config: ReduceScatterConfig, clusters: int, seed: int):
        problem = config.problem
        super().__init__(problem.devices, clusters, config.tiling, seed)
        self.config = config
        draw = np.random.default_rng(seed).integers
        # Products and sums of small whole numbers are exact, in any order.
        self.xs, self.ws = (
            [
                [draw(-3, 4, (planes, *sizes(k))).astype(np.float32) for k in problem.k]
                for _ in range(problem.devices)
            ]
            for planes, sizes in (
                (problem.planes, lambda k: (problem.all_rows, k)),
                (1, lambda k: (k, problem.n)[:: 1 if problem.w_contracted_axis == 1 else -1]),
            )
        )
        width = config.tiling.epilogue_tile_n
        blocked = problem.n // width, problem.m, width
        if problem.kind == "two_shot":
            results = problem.planes * problem.devices, *blocked
        else:
            results = problem.planes, problem.m, problem.n
        self.ys = self.allocate(NEVER, *results, dtype=np.float32)
        sources = problem.planes * config.sources
        self.partials = self.allocate(NEVER, sources, *blocked, dtype=np.float32)
        terms = [name for name in ("x", "w") for _ in problem.k]
        self.requested = requested_resources(
            reduce_scatter_kernel, self.work(0).run, [*terms, "y", "partials"]
        )
        self.semaphores = self.allocate(0, *self.requested.arrived.shape, dtype=int)
        # The results, and what peers had stored, as they were when each kernel ended.
        self.kept: dict[int, np.ndarray] = {}
        self.received: dict[int, np.ndarray] = {}
        # Of a cluster, since a stage is free when all its blocks have let it go.
        arrivals = CONSUMERS * math.prod(config.tiling.cluster)
        consumed = defaultdict(lambda: Barriers(config.tiling.max_concurrent_steps, arrivals))
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        shared = {"y": self.ys, "partials": self.partials, "arrived": self.semaphores}
        for place in self.places():
            arrays = [shared[name] for name in self.requested.reached]
            rendezvous = SimulatedRendezvous(self, place, others, arrays, WARPGROUP)
            self.add_block(place, consumed[place[AXIS], place["cluster"]], rendezvous)

    def work(self, device: int) -> Scattering:
        return Scattering(self.config, False, self.xs[device], self.ws[device])

    def add_block(
        self, place: dict[str, int], consumed: Barriers, rendezvous: SimulatedRendezvous
    ) -> None:
        tiling, problem, device = self.config.tiling, self.config.problem, place[AXIS]

        def memory(*shape: int) -> Reference:
            return Reference.to(np.full(shape, NEVER, np.float32))

        w_slice = (tiling.tile_k, tiling.tile_n)[:: 1 if problem.w_contracted_axis == 1 else -1]
        stages = (
            memory(tiling.max_concurrent_steps, tiling.tile_m, tiling.tile_k),
            memory(tiling.max_concurrent_steps, *w_slice),
            Barriers(tiling.max_concurrent_steps, 2),
            consumed,
        )
        strip = tiling.tile_m, tiling.epilogue_tile_n
        incoming = Reference.to(stages[0].array.reshape(tiling.max_concurrent_steps, -1, *strip))
        strips = memory(
            CONSUMERS, tiling.epilogue_stages, tiling.warpgroup_tile[0], tiling.epilogue_tile_n
        )
        strips = Strips(strips, Image.of(strips, tiling.swizzle))
        xs, ws = ([Reference.to(a) for a in arrays[device]] for arrays in (self.xs, self.ws))
        results = self.ys, self.partials, self.semaphores
        y, partials, arrived = (Reference.to(arrays[device]) for arrays in results)

        met = Barriers(1, self.requested.scratch["met"].num_arrivals).at[0]

        def work() -> Scattering:
            made = self.work(device)
            # What is made in `run`.
            made.incoming = Strips(incoming, Image.of(incoming, tiling.swizzle))
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
        config = self.config
        expected = config.sources * CONSUMERS
        assert set(self.semaphores[device][: config.local_tiles]) <= {0, expected}
        self.received[device] = self.partials[device].copy()
        y = self.ys[device]
        blocked = config.problem.kind == "two_shot"
        self.kept[device] = (
            np.array(in_rows(jnp.asarray(y), config.tiling.swizzle)) if blocked else y.copy()
        )
        super().end(device)

    def expected(self, device: int) -> np.ndarray:
        problem = self.config.problem
        transpose = problem.w_contracted_axis == 2
        products = [
            x @ (w[0].T if transpose else w[0])
            for xs, ws in zip(self.xs, self.ws, strict=True)
            for x, w in zip(xs, ws, strict=True)
        ]
        product = np.sum(products, axis=0)
        if problem.kind == "one_shot":
            return product
        by_owner = product.reshape(problem.planes, problem.devices, problem.m, problem.n)
        if problem.kind == "scatter":
            return by_owner[:, device]
        return by_owner.reshape(-1, problem.m, problem.n)


WIDE = Tiling(
    128, 128, max_concurrent_steps=3, epilogue_stages=2, cluster_dimension=None, grid_tile_width=2
)
LOW = replace(WIDE, tile_m=64, wg_dimension="n", epilogue_stages=1)

CONFIGS = {
    "whole tiles": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 256, (64,), 192), WIDE
    ),
    "more steps than stores take": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 128, (640,), 128), WIDE
    ),
    "several terms, planes, transposed": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 2, 64, (64, 128), 128, w_contracted_axis=2), LOW
    ),
    "clusters along the rows": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 256, (64,), 128), replace(WIDE, cluster_dimension="m")
    ),
    "clusters along the columns": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 64, (64,), 320), replace(LOW, cluster_dimension="n")
    ),
    "tiles shared by all": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 4, 2, 16, (64,), 192), WIDE
    ),
    "tiles shared by two": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 64, (128,), 192), WIDE
    ),
    "clusters shared by four": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 64, (64,), 128), replace(WIDE, cluster_dimension="m")
    ),
    "a strip beyond the end": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 8, (64,), 64), WIDE
    ),
    "two steps": ReduceScatterConfig(ReduceScatterProblem("two_shot", 3, 1, 128, (64,), 192), WIDE),
    "two steps, shared tiles": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 32, (64,), 128), LOW
    ),
    "two steps, half a swizzle": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 2, 1, 64, (96,), 128), replace(WIDE, swizzle=64)
    ),
    "shared tiles, half a swizzle": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 4, 1, 16, (96,), 128), replace(LOW, swizzle=64)
    ),
    "one shot, few rows": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 3, 1, 24, (64,), 128), LOW
    ),
    "narrow strips": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 2, 1, 40, (320,), 192), replace(LOW, tile_n=64, swizzle=64)
    ),
    "narrow strips, half a tile beyond the end": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 32, (64,), 160), replace(LOW, tile_n=64, swizzle=64)
    ),
    "three strips, own tiles in a row": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 2, 128, (64,), 192),
        replace(WIDE, tile_n=192, epilogue_stages=3),
    ),
    "seven strips, two steps": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 2, 1, 256, (64,), 448),
        replace(WIDE, tile_n=224, epilogue_stages=7, swizzle=64),
    ),
    "narrow strips, two steps": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 32, (64,), 160), replace(LOW, tile_n=64, swizzle=64)
    ),
    "one shot": ReduceScatterConfig(ReduceScatterProblem("one_shot", 3, 1, 72, (64,), 192), WIDE),
    "one shot, several tiles, clusters": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 2, 1, 136, (64,), 128), replace(LOW, cluster_dimension="m")
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sums(config: ReduceScatterConfig, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.fits()
    simulation = ScatterSimulation(config, 2, seed)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    for device in range(config.problem.devices):
        np.testing.assert_array_equal(simulation.kept[device], simulation.expected(device))


def test_products_are_added_in_the_order_of_the_devices_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIGS["whole tiles"]
    devices, rows = config.problem.devices, config.problem.m
    simulation = ScatterSimulation(config, 2, 0)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    for device in range(devices):
        blocks = np.empty_like(simulation.received[device])
        Image.of(Reference.to(blocks), config.tiling.swizzle).write(simulation.received[device])
        received = blocks.swapaxes(1, 2).reshape(config.sources, rows, config.problem.n)
        mine = slice(device * rows, (device + 1) * rows)
        for source in range(config.sources):
            sender = (device + 1 + source) % devices
            product = simulation.xs[sender][0][0, mine] @ simulation.ws[sender][0][0]
            np.testing.assert_array_equal(received[source], product)


def test_a_tile_is_sent_strip_by_strip_while_the_next_is_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIGS["more steps than stores take"]
    # One block has both tiles, the peer's and its own.
    simulation = ScatterSimulation(config, 1, 0)
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
    assert len(stored) == config.problem.devices * CONSUMERS
    for steps in stored.values():
        first, second, *sums = steps
        assert 10 < first < second < 20
        assert sums == [20, 20]


def test_a_tile_that_is_sent_needs_all_its_strips() -> None:
    config = CONFIGS["whole tiles"]
    assert not replace(config, tiling=replace(config.tiling, epilogue_stages=1)).fits()
