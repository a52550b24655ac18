"""The protocol of the kernel that gathers and multiplies, played by threads in any order.

Its senders and producers are simulated. What they send too late, or overwrite too early, shows as
rows that have not arrived when they are to be multiplied; what they send too early, or to a device
whose kernel has ended, as memory that another touches.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from collective_matmul.backends.fused import all_gather_kernel, all_gather_sender
from collective_matmul.backends.fused.all_gather_config import Plan, Shapes
from collective_matmul.backends.fused.all_gather_kernel import Gathering
from collective_matmul.backends.fused.all_gather_sender import Sender
from collective_matmul.mosaic_gpu import matmul_kernel
from collective_matmul.mosaic_gpu.peer_memory import WARP
from collective_matmul.mosaic_gpu.tiling import Problem, Tiles
from tests.mosaic_gpu.simulated_memory import Barriers, Reference
from tests.mosaic_gpu.simulated_rendezvous import SimulatedRendezvous, requested_resources
from tests.mosaic_gpu.simulation import AXIS, Actor, Simulation

MODULES = all_gather_kernel, all_gather_sender, matmul_kernel
NEVER = np.nan


class GatherSimulation(Simulation):
    """Blocks of a sender and a producer, and what is multiplied where."""

    def __init__(self, plan: Plan, keep: bool, blocks: int, seed: int):
        shapes, problem = plan.shapes, plan.shapes.problem(plan.joins)
        clusters = blocks // math.prod(plan.tiles.cluster)
        super().__init__(shapes.devices, clusters, plan.tiles, seed)
        self.plan, self.keep = plan, keep
        shape = shapes.planes, shapes.devices, shapes.rows, shapes.contracted
        whole = np.random.default_rng(seed).standard_normal(shape)
        self.shards = [whole[:, d] for d in range(shapes.devices)]
        self.expected = whole.reshape(problem.batch, problem.rows, shapes.contracted)
        self.gathered = self.allocate(NEVER, *self.expected.shape)
        refs = [name for name in ("w", "y") for _ in problem.columns]
        self.requested = requested_resources(
            all_gather_kernel, self.work().run, ["shard", *refs, "gathered"]
        )
        self.semaphores = self.allocate(0, *self.requested.arrived.shape, dtype=int)
        # What has been gathered when each kernel ends.
        self.kept: dict[int, np.ndarray] = {}
        self.multiplied = [Counter() for _ in self.shards]
        others: dict[tuple[int, ...], SimulatedRendezvous] = {}
        shared = {"gathered": self.gathered, "arrived": self.semaphores}
        for place in self.places():
            arrays = [shared[name] for name in self.requested.reached]
            rendezvous = SimulatedRendezvous(self, place, others, arrays, WARP)
            self.add(place, self.sender(rendezvous))
            self.add(place, self.producer(rendezvous))

    def work(self, rendezvous: SimulatedRendezvous | None = None) -> Gathering:
        problem = self.plan.shapes.problem(self.plan.joins)
        arrays = [SimpleNamespace(shape=(problem.batch, problem.rows, n)) for n in problem.columns]
        weights = [SimpleNamespace(shape=(1, *_weight(problem, n))) for n in problem.columns]
        gathered = SimpleNamespace(shape=(problem.batch, problem.rows, *problem.contracted))
        work = Gathering(self.plan, self.keep, False, gathered, weights, arrays)
        work.rendezvous = rendezvous
        return work

    def operands(self, device: int) -> tuple[Reference, Reference, Reference]:
        arrays = self.shards[device], self.gathered[device], self.semaphores[device]
        shard, gathered, arrived = map(Reference.to, arrays)
        return shard, gathered, arrived

    def sender(self, rendezvous: SimulatedRendezvous) -> Callable[[], None]:
        def act() -> None:
            scratch = self.requested.scratch
            boxes = Reference.to(np.full(scratch["boxes"].shape, NEVER))
            loaded = Barriers(len(boxes.array), scratch["loaded"].num_arrivals)
            sender = Sender(self.plan, self.keep, False, rendezvous)
            sender.send(*self.operands(rendezvous.axis_index), boxes, loaded)
            # Shared memory is another kernel's when this one has ended.
            assert not any(copy.destination.array is boxes.array for copy in self.copies)
            assert sum(loaded.arrivals) == loaded.num_arrivals * sum(loaded.waits.values())

        return act

    def producer(self, rendezvous: SimulatedRendezvous) -> Callable[[], None]:
        device = rendezvous.axis_index

        def act() -> None:
            work = self.work(rendezvous)
            ws = [Reference.to(np.empty((1, 1, 1 + q))) for q in range(work.results)]
            tile, within = self.plan.tiles.rows, self.expected.shape[1]

            def visit(turn, batch, row, across):
                def load(first, steps, read_x, read_w, stages, start, stop):
                    plane = work.out_plane(None, batch)
                    # All rows of the tile that there are.
                    count = max(0, min(tile, within - row))
                    columns = slice(start * work.tiles.contracted, stop * work.tiles.contracted)
                    rows = self.expected[plane, row : row + count, columns]
                    self.here().wait()
                    x = read_x(0, columns)
                    np.testing.assert_array_equal(x.read()[:count], rows)
                    w = read_w(0, slice(0, 1))
                    key = plane, row, w.array.shape[2] - 1, w.starts[2]
                    self.multiplied[device].update({(*key, step): 1 for step in range(start, stop)})

                work.load = load
                indices = [0] * (work.results + 2)
                operands = indices, self.operands(device), [ws]
                work.load_tile(operands, None, turn, batch, row, across)

            work.walk(visit)

        return act

    def end(self, device: int) -> None:
        self.kept[device] = self.gathered[device].copy()
        super().end(device)

    def receivers(self, actor: Actor) -> list[int]:
        """The devices that an actor has stored to, in this order."""
        stores = (copy.destination.array for group in actor.groups for copy in group)
        return [
            next(device for device, mine in enumerate(self.gathered) if mine is array)
            for array in stores
        ]


def _weight(problem: Problem, columns: int) -> tuple[int, ...]:
    shape = *problem.contracted, columns
    return shape if problem.w_contracted == 1 else shape[::-1]


LOW = Tiles(64, 64, split="columns", swizzle=64, share=None, sweep="columns", sweep_width=2)
HIGH = replace(LOW, rows=128, columns=128, split="rows", share="w")

PLANS = {
    "one tile to a shard": Plan(Shapes(2, 1, 64, 64, (64,)), LOW, False, 64, 1, (16, 64), 1, (1,)),
    "fewer messages than blocks": Plan(
        Shapes(3, 1, 64, 64, (64,)), LOW, False, 64, 1, (64, 64), 1, (1, 1)
    ),
    "messages of several boxes": Plan(
        Shapes(3, 1, 72, 128, (192,)), LOW, False, 64, 1, (1, 64), 4, (1, 1)
    ),
    "messages of several boxes, in one pass": Plan(
        Shapes(3, 1, 40, 128, (192,)), LOW, False, 40, 1, (1, 64), 4, (2,)
    ),
    "messages of several of the largest boxes": Plan(
        Shapes(3, 1, 512, 64, (64,)), LOW, False, 512, 1, (64, 64), 4, (1, 1)
    ),
    "clusters, a smaller last group": Plan(
        Shapes(2, 2, 200, 64, (128, 64)), HIGH, False, 120, 1, (40, 64), 1, (1,)
    ),
    "clusters along the columns": Plan(
        Shapes(4, 1, 40, 64, (192,)), replace(HIGH, share="x"), False, 40, 1, (8, 64), 1, (1, 1, 1)
    ),
    "clusters along the columns, in two passes": Plan(
        Shapes(4, 1, 40, 64, (192,)), replace(HIGH, share="x"), False, 40, 1, (8, 64), 1, (1, 2)
    ),
    "slabs": Plan(Shapes(2, 1, 64, 256, (64,)), LOW, False, 64, 4, (8, 64), 2, (1,)),
    "slabs of several boxes, a smaller last group": Plan(
        Shapes(3, 2, 24, 256, (64,)), LOW, False, 16, 2, (2, 64), 2, (1, 1)
    ),
    "slabs of several boxes, in one pass": Plan(
        Shapes(3, 1, 24, 256, (64,)), LOW, False, 16, 2, (1, 64), 4, (2,)
    ),
    "slabs, in two passes, the first to several": Plan(
        Shapes(4, 1, 24, 256, (64,)), LOW, False, 16, 2, (1, 64), 4, (2, 1)
    ),
    "slabs, clusters, groups smaller than tiles": Plan(
        Shapes(2, 1, 104, 128, (64,)), HIGH, False, 40, 2, (8, 64), 1, (1,)
    ),
    "joins": Plan(Shapes(4, 2, 4, 64, (128,)), LOW, True, 4, 1, (1, 32), 2, (3,)),
    "joins, several tiles": Plan(Shapes(3, 1, 48, 64, (64,)), LOW, True, 48, 1, (16, 64), 1, (2,)),
    "joins, slabs": Plan(Shapes(3, 2, 12, 192, (64,)), LOW, True, 12, 3, (4, 64), 1, (2,)),
    "joins, clusters": Plan(Shapes(3, 1, 104, 64, (64,)), HIGH, True, 104, 1, (8, 64), 1, (2,)),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_row_is_here_when_it_is_multiplied(
    plan: Plan, seed: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = GatherSimulation(plan, keep, 2, seed)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    tiles, problem = plan.tiles, plan.shapes.problem(plan.joins)
    for device, multiplied in enumerate(simulation.multiplied):
        visits = {key for key in multiplied if key[1] < problem.rows}
        assert set(multiplied.values()) == {1}
        assert {(*key[:3], key[-1]) for key in visits} == {
            (plane, row, q, step)
            for plane in range(problem.batch)
            for row in range(0, problem.rows, tiles.rows)
            for q in range(len(problem.columns))
            for step in range(plan.shapes.contracted // tiles.contracted)
        }
        if keep or plan.joins:
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
        "joins",
    ],
)
def test_the_device_that_needs_a_shard_first_gets_it_first(
    name: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of a pass get each box together."""
    plan = PLANS[name]
    simulation = GatherSimulation(plan, keep, 2, 0)
    simulation.play(monkeypatch, MODULES)
    simulation.run()
    devices = plan.shapes.devices
    orders = [
        (actor.place[AXIS], order)
        for actor in simulation.actors
        if (order := simulation.receivers(actor))
    ]
    assert len(orders) == 2 * devices
    for sender, order in orders:
        # Device d multiplies the shards of d, d + 1, d + 2 and so on.
        needing = [(sender - later) % devices for later in range(1, devices)]
        passes = [needing[sum(plan.passes[:n]) :][:peers] for n, peers in enumerate(plan.passes)]
        if plan.joins:
            passes[0].append(sender)
        elif keep:
            passes.append([sender])
        boxes = len(order) // sum(map(len, passes)) // plan.pieces
        sent = iter(order)
        for together, _ in itertools.product(passes, range(boxes)):
            copies = itertools.islice(sent, len(together) * plan.pieces)
            assert Counter(copies) == Counter(together * plan.pieces)
