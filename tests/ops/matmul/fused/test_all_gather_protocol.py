"""The protocol of the all-gather and matmul kernel, simulated: threads run in any order.

The senders and producers of several devices execute the kernel's own code on NumPy arrays. What is
sent too late, or overwritten too early, shows as rows that have not arrived when they are loaded.
What is sent before a peer's kernel starts, or after it ended, shows as memory that was touched.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.hopper_matmul import matmul_kernel, tile_loader, tile_scheduler
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import MatmulProblem, Tiling
from collective_matmul.mosaic_gpu.kernel_types import Operands, TileCoord
from collective_matmul.mosaic_gpu.peers.peer_memory import WARP
from collective_matmul.ops.matmul.fused import all_gather_kernel, all_gather_sender
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig, AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_kernel import (
    AllGatherGemm,
    GatheredOperand,
    ScaledAllGatherGemm,
)
from collective_matmul.ops.matmul.fused.all_gather_sender import Sender
from tests.mosaic_gpu.simulated_memory import Barriers, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous, requested_resources
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation

MODULES = all_gather_kernel, all_gather_sender, matmul_kernel, tile_loader, tile_scheduler
NEVER = np.nan


class GatherSimulation(Simulation):
    """Blocks of a sender and a producer. Loads are compared with the gathered x, and counted."""

    def __init__(self, config: AllGatherConfig, keep: bool, blocks: int, seed: int):
        problem, matmul = config.problem, config.problem.matmul(config.tiles_span_shards)
        clusters = blocks // math.prod(config.tiling.cluster)
        super().__init__(problem.devices, clusters, config.tiling, seed)
        self.config, self.keep = config, keep
        shape = problem.planes, problem.devices, problem.m, problem.columns
        whole = np.random.default_rng(seed).standard_normal(shape)
        self.shards = [whole[:, d].copy() for d in range(problem.devices)]
        self.expected = whole.reshape(matmul.batch, matmul.m, problem.columns)
        # The shards, and what is gathered, as the senders see them.
        self.sent = [
            shard.reshape(problem.planes, -1, config.sent_columns) for shard in self.shards
        ]
        lines = matmul.m * config.lines_per_row
        self.gathered = self.allocate(NEVER, matmul.batch, lines, config.sent_columns)
        refs = ["scales", "lines"] if problem.scales else []
        refs += ["shard", *(name for name in ("w", "y") for _ in matmul.n), "gathered"]
        self.requested = requested_resources(all_gather_kernel, self.gemm().run, refs)
        self.semaphores = self.allocate(0, *self.requested.arrived.shape, dtype=int)
        # What has been gathered when each kernel ends.
        self.kept: dict[int, np.ndarray] = {}
        self.multiplied = [Counter() for _ in self.shards]
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        shared = {"gathered": self.gathered, "arrived": self.semaphores}
        for place in self.places():
            arrays = [shared[name] for name in self.requested.peer_arrays]
            rendezvous = SimulatedRendezvous(self, place, others, arrays, WARP)
            self.add(place, self.sender(rendezvous))
            self.add(place, self.producer(rendezvous))

    def gemm(self, rendezvous: SimulatedRendezvous | None = None) -> AllGatherGemm:
        matmul = self.config.problem.matmul(self.config.tiles_span_shards)
        arrays = [_Array((matmul.batch, matmul.m, n)) for n in matmul.n]
        weights = [_Array((1, *_weight(matmul, n))) for n in matmul.n]
        gathered = _Array(self.expected.shape)
        body = ScaledAllGatherGemm if self.config.problem.scales else AllGatherGemm
        gemm = body(self.config, self.keep, False, gathered, weights, arrays)
        if rendezvous is not None:
            gemm.rendezvous, gemm.x = rendezvous, self.x(rendezvous.axis_index)
        return gemm

    def x(self, device: int) -> GatheredOperand:
        gathered = self.gathered[device].reshape(self.expected.shape)
        arrays = self.shards[device], gathered, self.semaphores[device]
        return GatheredOperand(*map(Reference.to, arrays))

    def sender(self, rendezvous: Any) -> Callable[[], None]:
        def act() -> None:
            scratch = self.requested.scratch
            boxes = Reference.to(np.full(scratch["boxes"].shape, NEVER))
            loaded = Barriers(len(boxes.array), scratch["loaded"].num_arrivals)
            sender = Sender(self.config, self.keep, False, rendezvous)
            device = rendezvous.axis_index
            shard, gathered = map(Reference.to, (self.sent[device], self.gathered[device]))
            sender.send(shard, gathered, self.x(device).arrived, boxes, loaded)
            # Shared memory is another kernel's when this one has ended.
            assert not any(copy.destination.array is boxes.array for copy in self.copies)
            assert sum(loaded.arrivals) == loaded.num_arrivals * sum(loaded.waits.values())

        return act

    def producer(self, rendezvous: SimulatedRendezvous) -> Callable[[], None]:
        device = rendezvous.axis_index

        def act() -> None:
            gemm = self.gemm(rendezvous)
            ws = [Reference.to(np.empty((1, 1, 1 + q))) for q in range(gemm.results)]
            tile_m, end = self.config.tiling.tile_m, self.expected.shape[1]

            def visit(tile: TileCoord) -> None:
                def load(first, steps_per_plane, loads, stages, start, stop):
                    read_x, read_w = (each.read for each in loads)
                    plane = gemm.out_plane(None, tile.batch)
                    # All rows of the tile that there are.
                    count = max(0, min(tile_m, end - tile.row))
                    columns = slice(start * gemm.tiling.tile_k, stop * gemm.tiling.tile_k)
                    rows = self.expected[plane, tile.row : tile.row + count, columns]
                    self.here().wait()
                    x = read_x(0, columns)
                    np.testing.assert_array_equal(x.read()[:count], rows)
                    w = read_w(0, slice(0, 1))
                    key = plane, tile.row, w.array.shape[2] - 1, w.starts[2]
                    self.multiplied[device].update({(*key, step): 1 for step in range(start, stop)})

                gemm.load_k_blocks = load
                indices = [0] * (gemm.results + 2)
                x_stages = Reference.to(np.empty((1, tile_m, 1)))
                stages: Any = SimpleNamespace(x=x_stages, w=None)  # Loads are replaced.
                gemm.load_tile(Operands(indices, self.x(device), [ws]), stages, tile)

            gemm.for_each_tile(visit)

        return act

    def end(self, device: int) -> None:
        self.kept[device] = self.gathered[device].reshape(self.expected.shape).copy()
        super().end(device)

    def receivers(self, actor: Actor) -> list[int]:
        """Returns the devices that an actor has stored to, in this order."""
        stores = (copy.destination.array for group in actor.groups for copy in group)
        return [
            next(device for device, mine in enumerate(self.gathered) if mine is array)
            for array in stores
        ]


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any = jnp.bfloat16


def _weight(matmul: MatmulProblem, columns: int) -> tuple[int, ...]:
    shape = *matmul.k, columns
    return shape if matmul.w_contracted_axis == 1 else shape[::-1]


LOW = Tiling(
    64,
    64,
    wg_dimension="n",
    swizzle=64,
    cluster_dimension=None,
    grid_minor_dim="n",
    grid_tile_width=2,
)
HIGH = replace(LOW, tile_m=128, tile_n=128, wg_dimension="m", cluster_dimension="m")

BYTES = replace(LOW, tile_m=128, tile_n=128, tile_k=128, wg_dimension="m", swizzle=128)

CONFIGS = {
    "one tile to a shard": AllGatherConfig(
        AllGatherProblem(2, 1, 64, 64, (64,)), LOW, False, 64, 1, (16, 64), 1, (1,)
    ),
    "fewer messages than blocks": AllGatherConfig(
        AllGatherProblem(3, 1, 64, 64, (64,)), LOW, False, 64, 1, (64, 64), 1, (1, 1)
    ),
    "messages of several boxes": AllGatherConfig(
        AllGatherProblem(3, 1, 72, 128, (192,)), LOW, False, 64, 1, (1, 64), 4, (1, 1)
    ),
    "messages of several boxes, in one pass": AllGatherConfig(
        AllGatherProblem(3, 1, 40, 128, (192,)), LOW, False, 40, 1, (1, 64), 4, (2,)
    ),
    "messages of several of the largest boxes": AllGatherConfig(
        AllGatherProblem(3, 1, 512, 64, (64,)), LOW, False, 512, 1, (64, 64), 4, (1, 1)
    ),
    "clusters, a smaller last group": AllGatherConfig(
        AllGatherProblem(2, 2, 200, 64, (128, 64)), HIGH, False, 120, 1, (40, 64), 1, (1,)
    ),
    "clusters along the columns": AllGatherConfig(
        AllGatherProblem(4, 1, 40, 64, (192,)),
        replace(HIGH, cluster_dimension="n"),
        False,
        40,
        1,
        (8, 64),
        1,
        (1, 1, 1),
    ),
    "clusters along the columns, in two passes": AllGatherConfig(
        AllGatherProblem(4, 1, 40, 64, (192,)),
        replace(HIGH, cluster_dimension="n"),
        False,
        40,
        1,
        (8, 64),
        1,
        (1, 2),
    ),
    "slabs": AllGatherConfig(
        AllGatherProblem(2, 1, 64, 256, (64,)), LOW, False, 64, 4, (8, 64), 2, (1,)
    ),
    "slabs of several boxes, a smaller last group": AllGatherConfig(
        AllGatherProblem(3, 2, 24, 256, (64,)), LOW, False, 16, 2, (2, 64), 2, (1, 1)
    ),
    "slabs of several boxes, in one pass": AllGatherConfig(
        AllGatherProblem(3, 1, 24, 256, (64,)), LOW, False, 16, 2, (1, 64), 4, (2,)
    ),
    "slabs, in two passes, the first to several": AllGatherConfig(
        AllGatherProblem(4, 1, 24, 256, (64,)), LOW, False, 16, 2, (1, 64), 4, (2, 1)
    ),
    "slabs, clusters, groups smaller than tiles": AllGatherConfig(
        AllGatherProblem(2, 1, 104, 128, (64,)), HIGH, False, 40, 2, (8, 64), 1, (1,)
    ),
    "tiles span shards": AllGatherConfig(
        AllGatherProblem(4, 2, 4, 64, (128,)), LOW, True, 4, 1, (1, 32), 2, (3,)
    ),
    "tiles span shards, several tiles": AllGatherConfig(
        AllGatherProblem(3, 1, 48, 64, (64,)), LOW, True, 48, 1, (16, 64), 1, (2,)
    ),
    "tiles span shards, slabs": AllGatherConfig(
        AllGatherProblem(3, 2, 12, 192, (64,)), LOW, True, 12, 3, (4, 64), 1, (2,)
    ),
    "messages in 8 bits, in lines of several rows": AllGatherConfig(
        AllGatherProblem(3, 1, 64, 384, (64,), 2, "rows"), BYTES, False, 64, 1, (8, 128), 2, (1, 1)
    ),
    "messages in 8 bits, a smaller last group": AllGatherConfig(
        AllGatherProblem(2, 2, 24, 128, (64,), 2, "blocks"), BYTES, False, 16, 1, (4, 128), 1, (1,)
    ),
    "messages in 8 bits, tiles span shards": AllGatherConfig(
        AllGatherProblem(3, 1, 24, 128, (64,), 2, "rows"), BYTES, True, 24, 1, (6, 128), 1, (2,)
    ),
    "tiles span shards, clusters": AllGatherConfig(
        AllGatherProblem(3, 1, 104, 64, (64,)), HIGH, True, 104, 1, (8, 64), 1, (2,)
    ),
}


#: Seeds are orders of the threads. In each order every other configuration keeps what it gathers.
SCHEDULES = [
    pytest.param(
        config,
        seed,
        keep,
        id=f"{name}-{seed}-{keep}",
        marks=() if seed == 0 else pytest.mark.exhaustive,
    )
    for index, (name, config) in enumerate(CONFIGS.items())
    for seed in (0, 1)
    for keep in (False, True)
    if (index + seed) % 2 == keep
]


@pytest.mark.parametrize(("config", "seed", "keep"), SCHEDULES)
def test_every_row_is_here_when_it_is_multiplied(
    config: AllGatherConfig, seed: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = GatherSimulation(config, keep, 2, seed)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    tiling, matmul = config.tiling, config.problem.matmul(config.tiles_span_shards)
    for device, multiplied in enumerate(simulation.multiplied):
        visits = {key for key in multiplied if key[1] < matmul.m}
        assert set(multiplied.values()) == {1}
        assert {(*key[:3], key[-1]) for key in visits} == {
            (plane, row, q, step)
            for plane in range(matmul.batch)
            for row in range(0, matmul.m, tiling.tile_m)
            for q in range(len(matmul.n))
            for step in range(config.problem.k // tiling.tile_k)
        }
        if keep or config.tiles_span_shards:
            np.testing.assert_array_equal(simulation.kept[device], simulation.expected)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "messages of several boxes",
        "messages of several boxes, in one pass",
        "clusters along the columns",
        "clusters along the columns, in two passes",
        "slabs, in two passes, the first to several",
        "tiles span shards",
    ],
)
def test_the_device_that_needs_a_shard_first_gets_it_first(
    name: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices of a pass get each box before the next box is sent."""
    config = CONFIGS[name]
    simulation = GatherSimulation(config, keep, 2, 0)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    devices = config.problem.devices
    orders = [
        (actor.place[AXIS], order)
        for actor in simulation.actors
        if (order := simulation.receivers(actor))
    ]
    assert len(orders) == 2 * devices
    for sender, order in orders:
        # Device d multiplies the shards of d, d + 1, d + 2 and so on.
        needing = [(sender - later) % devices for later in range(1, devices)]
        peers_per_pass = [
            needing[sum(config.peers_per_pass[:n]) :][:peers]
            for n, peers in enumerate(config.peers_per_pass)
        ]
        if config.tiles_span_shards:
            peers_per_pass[0].append(sender)
        elif keep:
            peers_per_pass.append([sender])
        boxes = len(order) // sum(map(len, peers_per_pass)) // config.pieces
        sent = iter(order)
        for together, _ in itertools.product(peers_per_pass, range(boxes)):
            copies = itertools.islice(sent, len(together) * config.pieces)
            assert Counter(copies) == Counter(together * config.pieces)
