"""The all-gather and matmul kernel in 8 bits, simulated with the warpgroups that multiply.

A scale that is read before its row has arrived shows as NaN. Numbers of messages are NumPy floats:
one in the place of each value, and one in the place of the first byte of each scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.hopper_matmul import (
    matmul_kernel,
    scaled_kernel,
    tile_loader,
    tile_scheduler,
)
from collective_matmul.mosaic_gpu.hopper_matmul.row_scales import FLOAT32_BYTES
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import CONSUMERS, Tiling
from collective_matmul.mosaic_gpu.kernel_types import Operands, Stages
from collective_matmul.mosaic_gpu.peers.peer_memory import WARP
from collective_matmul.operands.scaled.scaling import BLOCK
from collective_matmul.ops.matmul.fused import all_gather_kernel, all_gather_sender
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig, AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_kernel import (
    GatheredOperand,
    ScaledAllGatherGemm,
)
from collective_matmul.ops.matmul.fused.all_gather_sender import Sender
from tests.mosaic_gpu.simulated_memory import Barriers, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous
from tests.mosaic_gpu.simulation import AXIS, Simulation, play_scales

MODULES = (
    all_gather_kernel,
    all_gather_sender,
    matmul_kernel,
    scaled_kernel,
    tile_loader,
    tile_scheduler,
)
NEVER = np.nan


class Array(NamedTuple):
    """An array, as far as a kernel knows it."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32


class ScaledGatherSimulation(Simulation):
    """Blocks of a sender, a producer and its consumers."""

    def __init__(self, config: AllGatherConfig, clusters: int, seed: int):
        problem, matmul = config.problem, config.matmul
        super().__init__(problem.devices, clusters, config.tiling, seed)
        self.config = config
        draw, blocks = np.random.default_rng(seed).integers, problem.k // BLOCK
        in_blocks = problem.scales == "blocks"
        # Sums of small whole numbers are exact, in any order.
        self.whole = np.zeros((problem.planes, problem.devices, problem.m, problem.columns))
        self.whole[..., : problem.k] = draw(-2, 3, (*self.whole.shape[:-1], problem.k))
        count = blocks if in_blocks else 1
        places = slice(problem.k, problem.k + FLOAT32_BYTES * count, FLOAT32_BYTES)
        self.whole[..., places] = draw(1, 4, (*self.whole.shape[:-1], count))
        self.row_scales = self.whole[..., places]
        self.ws = [draw(-2, 3, (1, n, problem.k)).astype(float) for n in problem.n]
        width = config.tiling.tile_n * config.tiling.cluster[1]
        scales = [draw(1, 4, -(-n // width) * width) for n in problem.n]
        self.w_scales = np.concatenate(scales).astype(float)
        if in_blocks:
            self.w_scales = draw(1, 4, (len(self.w_scales) // BLOCK, blocks)).astype(float)
        self.shards = [self.whole[:, d].copy() for d in range(problem.devices)]
        lines = matmul.m * config.lines_per_row
        self.gathered = self.allocate(NEVER, matmul.batch, lines, config.sent_columns)
        self.ys = [self.allocate(NEVER, matmul.batch, matmul.m, n) for n in problem.n]
        slabs = problem.planes * problem.devices * config.groups * config.slabs
        self.semaphores = self.allocate(0, slabs, dtype=int)
        self.kept: dict[int, list[np.ndarray]] = {}
        arrivals = CONSUMERS * math.prod(config.tiling.cluster)
        empty = defaultdict(lambda: Barriers(config.tiling.max_concurrent_steps, arrivals))
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        for place in self.places():
            shared = [self.gathered, self.semaphores]
            rendezvous = SimulatedRendezvous(self, place, others, shared, WARP)
            self.add_block(place, empty[place[AXIS], place["cluster"]], rendezvous)

    def gemm(self, rendezvous: SimulatedRendezvous) -> ScaledAllGatherGemm:
        config, matmul = self.config, self.config.matmul
        gathered = Array((matmul.batch, matmul.m, config.problem.columns))
        weights = [Array((1, n, config.problem.k)) for n in matmul.n]
        outs = [Array((matmul.batch, matmul.m, n)) for n in matmul.n]
        gemm = ScaledAllGatherGemm(config, False, False, gathered, weights, outs)
        # Set in `run`.
        gemm.rendezvous = rendezvous
        device = rendezvous.axis_index
        rows = self.gathered[device].reshape(gathered.shape)
        arrays = self.shards[device], rows, self.semaphores[device]
        gemm.x = GatheredOperand(*map(Reference.to, arrays))
        gemm.w_scales = Reference.to(self.w_scales)
        return gemm

    def add_block(
        self, place: dict[str, int], empty: Barriers, rendezvous: SimulatedRendezvous
    ) -> None:
        config, tiling, device = self.config, self.config.tiling, place[AXIS]

        def memory(*shape: int) -> Reference:
            return Reference.to(np.full(shape, NEVER))

        count = tiling.max_concurrent_steps
        stages = Stages(
            memory(count, tiling.tile_m, tiling.tile_k),
            memory(count, tiling.tile_n, tiling.tile_k),
            Barriers(count, 2),
            empty,
        )
        epilogue_tile = tiling.warpgroup_tile[0], tiling.epilogue_tile_n
        store_tiles = memory(CONSUMERS, tiling.epilogue_stages, *epilogue_tile)
        met: Any = rendezvous
        ws = [Reference.to(w) for w in self.ws]
        indices = [0] * (len(ws) + 2)

        def send() -> None:
            boxes = memory(config.buffers, *config.box)
            lines = self.shards[device].reshape(config.problem.planes, -1, config.sent_columns)
            shard, gathered = map(Reference.to, (lines, self.gathered[device]))
            loaded = Barriers(config.buffers, config.pieces)
            sender = Sender(config, False, False, met)
            sender.send(shard, gathered, Reference.to(self.semaphores[device]), boxes, loaded)

        def produce() -> None:
            gemm = self.gemm(rendezvous)
            gemm.load_tiles(Operands(indices, gemm.x, [ws]), stages)

        def consume(consumer: int) -> Callable[[], None]:
            outs = [Reference.to(y[device]) for y in self.ys]

            def act() -> None:
                gemm = self.gemm(rendezvous)
                gemm.run_mma_warpgroup(indices, consumer, stages, store_tiles, outs)

            return act

        for act in (send, produce, *map(consume, range(CONSUMERS))):
            self.add(place, act)

    def start(self, box: Reference, place: Reference, predicate: bool) -> None:
        # TMA knows the end of the columns if results are wider than an epilogue tile.
        width = self.config.tiling.epilogue_tile_n
        beyond = place.starts[-1] >= place.array.shape[-1] > width
        super().start(box, place, predicate and not beyond)

    def end(self, device: int) -> None:
        self.kept[device] = [y[device].copy() for y in self.ys]
        super().end(device)

    def expected(self) -> list[np.ndarray]:
        """The products, whose shape is that of the results."""
        problem, matmul, results, column = self.config.problem, self.config.matmul, [], 0
        values = self.whole[..., : problem.k]
        width = self.config.tiling.tile_n * self.config.tiling.cluster[1]
        for w in self.ws:
            n = w.shape[1]
            if problem.scales == "rows":
                scales = self.row_scales * self.w_scales[column : column + n]
                product = values @ w[0].T * scales
            else:
                x = values * np.repeat(self.row_scales, BLOCK, -1)
                rows = np.repeat(self.w_scales[column // BLOCK :], BLOCK, 0)[:n]
                product = x @ (w[0] * np.repeat(rows, BLOCK, 1)).T
            results.append(product.reshape(matmul.batch, matmul.m, n))
            column += -(-n // width) * width
        return results


TILING = Tiling(
    128,
    128,
    tile_k=128,
    max_concurrent_steps=3,
    cluster_dimension=None,
    grid_minor_dim="n",
    grid_tile_width=2,
)
CONFIGS = {
    "rows": AllGatherConfig(
        AllGatherProblem(3, 1, 136, 384, (192,), 2, "rows"),
        TILING,
        False,
        136,
        1,
        (8, 128),
        1,
        (2,),
    ),
    "rows, clusters, several results": AllGatherConfig(
        AllGatherProblem(2, 2, 72, 256, (192, 64), 2, "rows"),
        replace(TILING, cluster_dimension="m"),
        False,
        72,
        1,
        (12, 128),
        2,
        (1,),
    ),
    "rows, consumers divide the columns": AllGatherConfig(
        AllGatherProblem(2, 1, 64, 128, (192,), 2, "rows"),
        replace(TILING, tile_m=64, wg_dimension="n", cluster_dimension="n"),
        False,
        64,
        1,
        (16, 128),
        1,
        (1,),
    ),
    "rows, tiles span shards": AllGatherConfig(
        AllGatherProblem(3, 2, 24, 128, (64,), 2, "rows"), TILING, True, 24, 1, (6, 128), 1, (2,)
    ),
    "blocks": AllGatherConfig(
        AllGatherProblem(2, 1, 136, 384, (192, 64), 2, "blocks"),
        TILING,
        False,
        72,
        1,
        (8, 128),
        1,
        (1,),
    ),
    "blocks, consumers divide the columns": AllGatherConfig(
        AllGatherProblem(2, 1, 64, 256, (320,), 2, "blocks"),
        replace(TILING, tile_m=64, tile_n=256, wg_dimension="n"),
        False,
        64,
        1,
        (12, 128),
        1,
        (1,),
    ),
}


def load_from_rows(
    arrays: Sequence[Reference], number: int, plane: int, row: int, column: int
) -> np.ndarray:
    array = arrays[number].array
    rows = np.minimum(np.arange(row, row + 64), array.shape[1] - 1)
    return array[plane, rows, column].copy()


def results_of(
    config: AllGatherConfig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> ScaledGatherSimulation:
    simulation = ScaledGatherSimulation(config, 2, seed)
    simulation.play(monkeypatch, MODULES)
    play_scales(monkeypatch, scaled_kernel)
    monkeypatch.setattr(all_gather_kernel, "load_from_rows", load_from_rows)
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_right_in_any_order_of_threads(
    config: AllGatherConfig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = results_of(config, seed, monkeypatch)
    for results in simulation.kept.values():
        for result, expected in zip(results, simulation.expected(), strict=True):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["rows", "blocks"])
def test_scales_that_are_read_too_early_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScaledAllGatherGemm, "scales_arrive", False)
    simulation = results_of(CONFIGS[name], 0, monkeypatch)
    assert any(np.isnan(y).any() for results in simulation.kept.values() for y in results)
