"""The protocol of the matmul and reduce-scatter kernel, simulated: threads run in any order.

The load and MMA warpgroups of several devices execute the kernel's own code on NumPy arrays.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.hopper_matmul import (
    matmul_kernel,
    scaled_kernel,
    tile_loader,
    tile_scheduler,
)
from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import CONSUMERS, Tiling
from collective_matmul.mosaic_gpu.kernel_types import Operands, Stages
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP
from collective_matmul.operands.scaled.scaling import BLOCK
from collective_matmul.ops.matmul.fused import (
    owner_tile_scheduler,
    reduce_scatter_kernel,
    reduce_scatter_sender,
)
from collective_matmul.ops.matmul.fused.owner_tile_scheduler import EpilogueTiles
from collective_matmul.ops.matmul.fused.reduce_scatter import in_rows
from collective_matmul.ops.matmul.fused.reduce_scatter_config import (
    ReduceScatterConfig,
    ReduceScatterProblem,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_kernel import (
    GemmReduceScatter,
    ScaledGemmReduceScatter,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_sender import ReducedArrays
from tests.mosaic_gpu.simulated_memory import Barriers, RawReference, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous, requested_resources
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation, play_scales

MODULES = (
    reduce_scatter_kernel,
    reduce_scatter_sender,
    owner_tile_scheduler,
    matmul_kernel,
    scaled_kernel,
    tile_loader,
    tile_scheduler,
)
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
        self.draw_scales(draw)
        width = config.tiling.epilogue_tile_n
        blocked = problem.n // width, problem.m, width
        if problem.kind == "two_shot":
            results = problem.planes * problem.devices, *blocked
        else:
            results = problem.planes, problem.m, problem.n
        self.ys = self.allocate(NEVER, *results, dtype=np.float32)
        sources = problem.planes * config.sources
        self.partials = self.allocate(NEVER, sources, *blocked, dtype=np.float32)
        refs = ["x_scales", "w_scales"] if problem.scales else []
        refs += [name for name in ("x", "w") for _ in problem.k]
        self.requested = requested_resources(
            reduce_scatter_kernel, self.gemm(0).run, [*refs, "y", "partials"]
        )
        self.semaphores = self.allocate(0, *self.requested.arrived.shape, dtype=int)
        # The results, and what peers had stored, as they were when each kernel ended.
        self.kept: dict[int, np.ndarray] = {}
        self.received: dict[int, np.ndarray] = {}
        # Shared by a cluster: a stage is empty when all blocks of the cluster are done with it.
        arrivals = CONSUMERS * math.prod(config.tiling.cluster)
        empty = defaultdict(lambda: Barriers(config.tiling.max_concurrent_steps, arrivals))
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        shared = {"y": self.ys, "partials": self.partials, "arrived": self.semaphores}
        for place in self.places():
            arrays = [shared[name] for name in self.requested.peer_arrays]
            rendezvous = SimulatedRendezvous(self, place, others, arrays, WARPGROUP)
            self.add_block(place, empty[place[AXIS], place["cluster"]], rendezvous)

    def draw_scales(self, draw: Callable) -> None:
        """Draws the scales of operands, as the kernel reads them: for all rows and columns."""
        problem, config = self.config.problem, self.config
        rows = config.grid_m * config.cluster_tile_m
        steps = sum(problem.k) // BLOCK if problem.scales == "blocks" else 1
        columns = config.column_tiles * config.tiling.tile_n
        of_w = (columns // BLOCK, steps) if problem.scales == "blocks" else (columns,)
        devices = range(problem.devices)
        self.x_scales, self.w_scales = (
            [draw(1, 4, shape).astype(np.float32) for _ in devices]
            for shape in ((problem.planes, rows, steps), of_w)
        )

    def gemm(self, device: int) -> GemmReduceScatter:
        operands = self.xs[device], self.ws[device], np.dtype(np.float32)
        if self.config.problem.scales is None:
            return GemmReduceScatter(self.config, False, *operands)
        gemm = ScaledGemmReduceScatter(self.config, False, *operands, first_scale=0)
        # Set in `run`.
        gemm.x_scales = Reference.to(self.x_scales[device])
        gemm.w_scales = Reference.to(self.w_scales[device])
        return gemm

    def product(self, device: int) -> np.ndarray:
        """The product of a device's operands, which are scaled if they have scales."""
        problem, step = self.config.problem, 0
        total = np.zeros((problem.planes, problem.all_rows, problem.n), np.float32)
        for x, (w,) in zip(self.xs[device], self.ws[device], strict=True):
            w = w.T if problem.w_contracted_axis == 2 else w
            if problem.scales == "blocks":
                steps = slice(step, step := step + x.shape[-1] // BLOCK)
                x = x * np.repeat(self.x_scales[device][:, : x.shape[1], steps], BLOCK, -1)
                of_w = np.repeat(self.w_scales[device][:, steps], BLOCK, 0)[: problem.n]
                w = w * np.repeat(of_w, BLOCK, 1).T
            total = total + x @ w
        if problem.scales == "rows":
            total = total * self.x_scales[device][:, : problem.all_rows]
            total = total * self.w_scales[device][: problem.n]
        return total

    def add_block(
        self, place: dict[str, int], empty: Barriers, rendezvous: SimulatedRendezvous
    ) -> None:
        tiling, problem, device = self.config.tiling, self.config.problem, place[AXIS]

        def memory(*shape: int) -> Reference:
            return Reference.to(np.full(shape, NEVER, np.float32))

        w_k_block = (tiling.tile_k, tiling.tile_n)[:: 1 if problem.w_contracted_axis == 1 else -1]
        stages = Stages(
            memory(tiling.max_concurrent_steps, tiling.tile_m, tiling.tile_k),
            memory(tiling.max_concurrent_steps, *w_k_block),
            Barriers(tiling.max_concurrent_steps, 2),
            empty,
        )
        epilogue_tile = tiling.tile_m, tiling.epilogue_tile_n
        incoming = stages.x.array.reshape(tiling.max_concurrent_steps, -1, *epilogue_tile)
        incoming = Reference.to(incoming)
        store_tiles = memory(
            CONSUMERS, tiling.epilogue_stages, tiling.warpgroup_tile[0], tiling.epilogue_tile_n
        )
        store_tiles = EpilogueTiles(store_tiles, RawReference.view(store_tiles, tiling.swizzle))
        xs, ws = ([Reference.to(a) for a in arrays[device]] for arrays in (self.xs, self.ws))
        results = self.ys, self.partials, self.semaphores
        arrays = ReducedArrays(*(Reference.to(arrays[device]) for arrays in results))
        ready_arrivals = self.requested.scratch["peers_ready"].num_arrivals
        peers_ready = Barriers(1, ready_arrivals).at[0]

        def gemm() -> GemmReduceScatter:
            made = self.gemm(device)
            # Set in `run`.
            made.incoming = EpilogueTiles(incoming, RawReference.view(incoming, tiling.swizzle))
            made.rendezvous, made.peers_ready = rendezvous, peers_ready
            return made

        def produce() -> None:
            operands = Operands([0] * (2 * len(xs)), (xs, arrays), [[w] for w in ws])
            gemm().load_tiles(operands, stages)

        def consume(consumer: int) -> Callable[[], None]:
            return lambda: gemm().run_mma_warpgroup(None, consumer, stages, store_tiles, arrays)

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
        product = np.sum([self.product(d) for d in range(problem.devices)], axis=0)
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
    "tiles span all owners": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 4, 2, 16, (64,), 192), WIDE
    ),
    "tiles span two owners": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 64, (128,), 192), WIDE
    ),
    "clusters span four owners": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 1, 64, (64,), 128), replace(WIDE, cluster_dimension="m")
    ),
    "a tile has all rows, owners divide it unevenly": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 2, 24, (64,), 192), LOW
    ),
    "a tile has all rows, owners divide a warpgroup's part": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 3, 2, 40, (64,), 192), WIDE
    ),
    "a cluster's first block has all rows": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 48, (64,), 128), replace(WIDE, cluster_dimension="m")
    ),
    "two-shot, owners divide a warpgroup's part": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 40, (64,), 192), WIDE
    ),
    "an epilogue tile out of bounds": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 8, (64,), 64), WIDE
    ),
    "two-shot": ReduceScatterConfig(ReduceScatterProblem("two_shot", 3, 1, 128, (64,), 192), WIDE),
    "two-shot, tiles span owners": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 32, (64,), 128), LOW
    ),
    "two-shot, half a swizzle": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 2, 1, 64, (96,), 128), replace(WIDE, swizzle=64)
    ),
    "tiles span owners, half a swizzle": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 4, 1, 16, (96,), 128), replace(LOW, swizzle=64)
    ),
    "one-shot, few rows": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 3, 1, 24, (64,), 128), LOW
    ),
    "narrow epilogue tiles": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 2, 1, 40, (320,), 192), replace(LOW, tile_n=64, swizzle=64)
    ),
    "narrow epilogue tiles, half a tile beyond the end": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 32, (64,), 160), replace(LOW, tile_n=64, swizzle=64)
    ),
    "three epilogue tiles, consecutive local tiles": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 2, 128, (64,), 192),
        replace(WIDE, tile_n=192, epilogue_stages=3),
    ),
    "seven epilogue tiles, two-shot": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 2, 1, 256, (64,), 448),
        replace(WIDE, tile_n=224, epilogue_stages=7, swizzle=64),
    ),
    "narrow epilogue tiles, two-shot": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 32, (64,), 160), replace(LOW, tile_n=64, swizzle=64)
    ),
    "one-shot": ReduceScatterConfig(ReduceScatterProblem("one_shot", 3, 1, 72, (64,), 192), WIDE),
    "one-shot, several tiles, clusters": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 2, 1, 136, (64,), 128), replace(LOW, cluster_dimension="m")
    ),
    "scales of rows": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 1, 128, (640, 128), 192, 2, "rows"),
        replace(WIDE, tile_k=128),
    ),
    "scales of rows, tiles span owners": ReduceScatterConfig(
        ReduceScatterProblem("two_shot", 3, 1, 32, (128,), 192, 2, "rows"),
        replace(LOW, tile_k=128),
    ),
    "scales of blocks": ReduceScatterConfig(
        ReduceScatterProblem("scatter", 2, 2, 128, (640, 128), 192, 2, "blocks"),
        replace(WIDE, tile_k=128),
    ),
    "scales of blocks, one-shot": ReduceScatterConfig(
        ReduceScatterProblem("one_shot", 2, 1, 40, (256,), 192, 2, "blocks"),
        replace(LOW, tile_k=128, tile_n=256, epilogue_stages=2),
    ),
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sums_are_right_in_any_order_of_threads(
    config: ReduceScatterConfig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.fits()
    simulation = ScatterSimulation(config, 2, seed)
    simulation.play(monkeypatch, MODULES)
    play_scales(monkeypatch, scaled_kernel)
    simulation.run()
    for device in range(config.problem.devices):
        np.testing.assert_array_equal(simulation.kept[device], simulation.expected(device))


def test_products_are_added_in_the_order_of_the_devices_after_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIGS["whole tiles"]
    devices, rows = config.problem.devices, config.problem.m
    simulation = ScatterSimulation(config, 2, 0)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    for device in range(devices):
        blocks = np.empty_like(simulation.received[device])
        RawReference.view(Reference.to(blocks), config.tiling.swizzle).write(
            simulation.received[device]
        )
        received = blocks.swapaxes(1, 2).reshape(config.sources, rows, config.problem.n)
        mine = slice(device * rows, (device + 1) * rows)
        for source in range(config.sources):
            sender = (device + 1 + source) % devices
            product = simulation.xs[sender][0][0, mine] @ simulation.ws[sender][0][0]
            np.testing.assert_array_equal(received[source], product)


def test_a_tile_is_sent_in_epilogue_tiles_while_the_next_is_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIGS["more steps than stores take"]
    # One block has both tiles, the peer's and its own.
    simulation = ScatterSimulation(config, 1, 0)
    multiplied: Counter[Actor] = Counter()
    stored = defaultdict(list)
    start = simulation.start

    def mma(gemm, accumulator, tile_idx, part, stages, steps):
        PersistentGemm.mma(gemm, accumulator, tile_idx, part, stages, steps)
        multiplied[simulation.here()] += len(range(*steps))

    def note(*copy):
        stored[simulation.here()].append(multiplied[simulation.here()])
        start(*copy)

    monkeypatch.setattr(GemmReduceScatter, "mma", mma)
    monkeypatch.setattr(simulation, "start", note)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    assert len(stored) == config.problem.devices * CONSUMERS
    for steps in stored.values():
        first, second, *sums = steps
        assert 10 < first < second < 20
        assert sums == [20, 20]


def test_a_tile_that_is_sent_needs_a_store_tile_for_each_epilogue_tile() -> None:
    config = CONFIGS["whole tiles"]
    assert not replace(config, tiling=replace(config.tiling, epilogue_stages=1)).fits()
