"""The protocol of the kernel that gathers and multiplies, played by threads in any order.

Its senders and producers are simulated. What they send too late, or overwrite too early, shows as
rows that have not arrived when they are to be multiplied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.kernels import gather_kernel, matmul_kernel, peers
from collective_matmul.kernels.gather_kernel import Gathering
from collective_matmul.kernels.gather_plan import Plan, Shapes
from collective_matmul.kernels.tiles import Problem, Tiles
from tests.kernels.simulated_memory import Barriers, Reference
from tests.kernels.simulation import AXIS, Actor, Simulation

MODULES = gather_kernel, matmul_kernel, peers
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
        self.scoped, arrived = self.asked_for()
        self.semaphores = self.allocate(0, *arrived.shape, dtype=int)
        self.multiplied = [Counter() for _ in self.shards]
        for place in self.places():
            self.add(place, self.sender(place[AXIS]))
            self.add(place, self.producer(place[AXIS]))

    def work(self) -> Gathering:
        problem = self.plan.shapes.problem(self.plan.joins)
        arrays = [SimpleNamespace(shape=(problem.batch, problem.rows, n)) for n in problem.columns]
        weights = [SimpleNamespace(shape=(1, *_weight(problem, n))) for n in problem.columns]
        gathered = SimpleNamespace(shape=(problem.batch, problem.rows, *problem.contracted))
        return Gathering(self.plan, AXIS, self.keep, False, gathered, weights, arrays)

    def asked_for(self) -> tuple[dict[str, Any], Any]:
        """The memory that a kernel asks for, by name, and its semaphores."""
        scoped, semaphores = {}, []
        work = self.work()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather_kernel.pl, "get_global", semaphores.append)
            patch.setattr(gather_kernel.pl, "run_scoped", lambda _, **memory: scoped.update(memory))
            work.run(SimpleNamespace(dtype=jnp.bfloat16), *[None] * (2 * work.results + 1))
        return scoped, semaphores[0]

    def operands(self, device: int) -> tuple[Reference, Reference, Reference]:
        arrays = self.shards[device], self.gathered[device], self.semaphores[device]
        shard, gathered, arrived = map(Reference.to, arrays)
        return shard, gathered, arrived

    def sender(self, device: int) -> Callable[[], None]:
        def act() -> None:
            boxes = Reference.to(np.full(self.scoped["boxes"].shape, NEVER))
            loaded = Barriers(len(boxes.array), self.scoped["loaded"].num_arrivals)
            self.work().send(*self.operands(device), boxes, loaded)

        return act

    def producer(self, device: int) -> Callable[[], None]:
        def act() -> None:
            work = self.work()
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
    "one tile to a shard": Plan(Shapes(2, 1, 64, 64, (64,)), LOW, False, 64, 1, (16, 64), 1),
    "messages of several boxes": Plan(Shapes(3, 1, 72, 128, (192,)), LOW, False, 64, 1, (1, 64), 4),
    "clusters, a smaller last group": Plan(
        Shapes(2, 2, 200, 64, (128, 64)), HIGH, False, 120, 1, (40, 64), 1
    ),
    "clusters along the columns": Plan(
        Shapes(4, 1, 40, 64, (192,)), replace(HIGH, share="x"), False, 40, 1, (8, 64), 1
    ),
    "slabs": Plan(Shapes(2, 1, 64, 256, (64,)), LOW, False, 64, 4, (8, 64), 2),
    "slabs of several boxes, a smaller last group": Plan(
        Shapes(3, 2, 24, 256, (64,)), LOW, False, 16, 2, (1, 64), 4
    ),
    "slabs, clusters, groups smaller than tiles": Plan(
        Shapes(2, 1, 104, 128, (64,)), HIGH, False, 40, 2, (8, 64), 1
    ),
    "joins": Plan(Shapes(4, 2, 4, 64, (128,)), LOW, True, 4, 1, (1, 32), 2),
    "joins, several tiles": Plan(Shapes(3, 1, 48, 64, (64,)), LOW, True, 48, 1, (16, 64), 1),
    "joins, slabs": Plan(Shapes(3, 2, 12, 192, (64,)), LOW, True, 12, 3, (4, 64), 1),
    "joins, clusters": Plan(Shapes(3, 1, 104, 64, (64,)), HIGH, True, 104, 1, (8, 64), 1),
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
            np.testing.assert_array_equal(simulation.gathered[device], simulation.expected)


@pytest.mark.parametrize("name", ["messages of several boxes", "clusters along the columns"])
def test_the_device_that_needs_a_shard_first_gets_it_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name]
    simulation = GatherSimulation(plan, False, 2, 0)
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
        expected = [(sender - later) % devices for later in range(1, devices)]
        assert list(dict.fromkeys(order)) == expected
        assert order == sorted(order, key=expected.index)
