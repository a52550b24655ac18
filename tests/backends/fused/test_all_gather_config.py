"""The cut of the kernel that gathers and multiplies."""

from __future__ import annotations

import math

import pytest
from collective_matmul.dispatch.cost_model import LINK_BYTES_PER_SECOND

from collective_matmul.backends.fused.all_gather_config import (
    Shapes,
    candidates,
    make_plan,
    predicted_plan_microseconds,
)
from collective_matmul.mosaic_gpu.tiling import (
    ITEMSIZE,
    SHARED_MEMORY_BYTES,
    predicted_microseconds,
)


@pytest.mark.parametrize("rows", [4, 8, 24, 100, 128, 1000, 2048])
@pytest.mark.parametrize("contracted", [64, 192, 640, 2112, 4096])
def test_boxes_fill_a_shard(rows: int, contracted: int) -> None:
    shapes = Shapes(4, 2, rows, contracted, (1024,))
    for plan in candidates(shapes):
        high, wide = plan.box
        assert plan.slabs * plan.slab_columns == contracted
        assert plan.slab_columns % plan.tiles.contracted == 0
        assert plan.slabs == 1 or plan.slab_columns >= 512, "it is sent in small pieces"
        assert plan.boxes_across * wide == plan.slab_columns
        boxes = plan.messages * plan.boxes_per_message
        assert boxes * high * wide == shapes.planes * rows * contracted
        # Every slab, also of the last group, begins and ends with a message.
        size = high * wide * plan.boxes_per_message
        groups = {plan.rows_per_group, rows - (plan.groups - 1) * plan.rows_per_group}
        assert all(0 < group <= rows for group in groups)
        assert not any(group * plan.slab_columns % size for group in groups)
        # A piece is whole rows, or a part of one.
        assert high % plan.pieces == 0
        assert wide == contracted or high == plan.pieces
        assert plan.buffers >= 2
        boxes_bytes = plan.buffers * high * wide * ITEMSIZE
        assert plan.tiles.shared_memory_bytes + boxes_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("rows", "kilobytes"), [(64, 2), (128, 2), (256, 4), (512, 8), (4096, 8)])
def test_few_rows_leave_in_small_boxes(devices: int, rows: int, kilobytes: int) -> None:
    """So every block has one of each of four slabs; the largest boxes are sent fastest."""
    plans = candidates(Shapes(devices, 1, rows, 4096, (7168,)))
    plan = next(plan for plan in plans if plan.slabs == 4)
    box_bytes = ITEMSIZE * math.prod(plan.box)
    assert box_bytes == 1024 * kilobytes
    assert plan.slabs * plan.boxes_per_slab(rows) >= min(512, rows * 4)
    # Shared memory for boxes is used.
    assert plan.buffers * box_bytes == 16384
    sizes = {ITEMSIZE * math.prod(other.box) for other in plans}
    assert {2048, 4096, 8192} <= sizes, "all are tried"


@pytest.mark.parametrize("rows", [256, 1024])
def test_many_rows_are_multiplied_in_large_tiles(rows: int) -> None:
    """Small ones read their operands from shared memory more often than it can keep up with."""
    plan = candidates(Shapes(4, 1, rows, 8192, (7168,)))[0]
    assert plan.tiles.rows * plan.tiles.columns >= 128 * 192


def test_clusters_all_fit_on_a_gpu() -> None:
    """Four blocks of a cluster do not fit into what pairs leave of an odd number of pairs."""
    for rows in (8, 64, 512, 4096):
        plan = make_plan(Shapes(4, 1, rows, 4096, (4096,)))
        assert plan is not None
        assert plan.tiles.share != "both"


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("rows", [64, 512, 2048])
def test_a_group_of_rows_is_multiplied_at_once(devices: int, rows: int) -> None:
    """Tiles of a larger one would wait for slabs of rows that are not multiplied yet."""
    for plan in candidates(Shapes(devices, 1, rows, 8192, (7168,))):
        height = plan.tiles.rows * plan.tiles.cluster[0]
        wide = min(plan.across, plan.tiles.sweep_width)
        at_once = 132 // math.prod(plan.tiles.cluster) // wide * height
        if plan.joins:
            assert plan.groups == 1
        else:
            assert plan.rows_per_group == min(rows, at_once)


@pytest.mark.parametrize(
    ("shapes", "tile", "passes"),
    [
        (Shapes(2, 1, 64, 4096, (512,)), 64 * 64, {(1,)}),
        # All tiles in one wave.
        (Shapes(4, 1, 64, 4096, (512,)), 64 * 64, {(1, 1, 1), (3,)}),
        # A little less than one for each chunk: the last two are multiplied in the third.
        (Shapes(4, 1, 1024, 4096, (3584,)), 128 * 256, {(1, 1, 1), (1, 2)}),
        # One for each chunk, or more.
        (Shapes(4, 1, 1024, 4096, (7168,)), 128 * 256, {(1, 1, 1)}),
        (Shapes(4, 1, 4096, 4096, (7168,)), 64 * 64, {(1, 1, 1)}),
        (Shapes(8, 1, 512, 4096, (1792,)), 128 * 256, {(1,) * 7, (3, 4), (4, 3)}),
    ],
    ids=str,
)
def test_peers_whose_tiles_are_multiplied_together_may_get_a_shard_together(
    shapes: Shapes, tile: int, passes: set[tuple[int, ...]]
) -> None:
    plans = [p for p in candidates(shapes) if p.tiles.rows * p.tiles.columns == tile]
    assert {plan.passes for plan in plans if not plan.joins} == passes
    assert {plan.passes for plan in plans if plan.joins} <= {(shapes.devices - 1,)}


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [4, 100, 1024])
def test_every_peer_gets_a_shard(devices: int, rows: int) -> None:
    for plan in candidates(Shapes(devices, 1, rows, 4096, (1792,))):
        assert sum(plan.passes) == devices - 1 and min(plan.passes) > 0


MANY, FEW = Shapes(4, 1, 512, 8192, (7168,)), Shapes(4, 1, 512, 8192, (1024,))


@pytest.mark.parametrize(
    "shapes",
    [MANY, FEW, Shapes(8, 1, 512, 2048, (512,))],
    ids=["many columns", "few columns", "fewer tiles than multiprocessors"],
)
def test_no_plan_is_predicted_to_outrun_its_matmul_or_its_peers(shapes: Shapes) -> None:
    shard_bytes = ITEMSIZE * shapes.rows * shapes.contracted
    sending = (shapes.devices - 1) * shard_bytes / LINK_BYTES_PER_SECOND * 1e6
    for plan in candidates(shapes):
        predicted = predicted_plan_microseconds(plan)
        assert predicted > predicted_microseconds(shapes.problem(plan.joins), plan.tiles)
        assert predicted > sending


def test_tiles_of_joined_shards_end_after_the_last_slab_has_come() -> None:
    """However few columns they have."""
    shapes = Shapes(4, 1, 512, 8192, (128,))
    sending = (shapes.devices - 1) * ITEMSIZE * shapes.rows * shapes.contracted
    for plan in candidates(shapes):
        if plan.joins:
            assert predicted_plan_microseconds(plan) > 1e6 * sending / LINK_BYTES_PER_SECOND


def test_slabs_pay_where_rows_are_awaited() -> None:
    def predicted(shapes: Shapes, slabs: int) -> float:
        plans = [plan for plan in candidates(shapes) if plan.slabs == slabs and not plan.joins]
        return min(map(predicted_plan_microseconds, plans))

    assert predicted(FEW, 4) < 0.95 * predicted(FEW, 1)
    assert predicted(MANY, 4) < predicted(MANY, 16)


def test_joined_shards_crowd_the_links() -> None:
    """Where several peers send to a device at once. Of two devices each has one peer."""

    def loss(devices: int) -> float:
        shapes = Shapes(devices, 1, 4096 // devices, 8192, (8192 // devices,))
        joined, apart = (
            min(predicted_plan_microseconds(plan) for plan in candidates(shapes) if plan.joins == j)
            for j in (True, False)
        )
        return joined / apart

    assert loss(2) < 1.15 < loss(4)
