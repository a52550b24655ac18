"""The cut of the kernel that gathers and multiplies."""

from __future__ import annotations

import math

import pytest

from collective_matmul.kernels.gather_plan import BUFFERS, Shapes, candidates, make_plan
from collective_matmul.kernels.tiles import ITEMSIZE, SHARED_MEMORY_BYTES


@pytest.mark.parametrize("rows", [4, 8, 24, 100, 128, 1000, 2048])
@pytest.mark.parametrize("contracted", [64, 192, 640, 2112, 4096])
def test_boxes_fill_a_shard(rows: int, contracted: int) -> None:
    shapes = Shapes(4, 2, rows, contracted, (1024,))
    for plan in candidates(shapes):
        high, wide = plan.box
        assert plan.slabs * plan.slab_columns == contracted
        assert plan.slab_columns % plan.tiles.contracted == 0
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


@pytest.mark.parametrize("rows", [256, 1024])
def test_many_rows_are_multiplied_in_large_tiles(rows: int) -> None:
    """Small ones read their operands from shared memory more often than it can keep up with."""
    plan = make_plan(Shapes(4, 1, rows, 8192, (7168,)))
    assert plan is not None
    assert plan.tiles.rows * plan.tiles.columns >= 128 * 192
    boxes = BUFFERS * math.prod(plan.box) * ITEMSIZE
    assert plan.tiles.shared_memory_bytes + boxes <= SHARED_MEMORY_BYTES


def test_clusters_all_fit_on_a_gpu() -> None:
    """Four blocks of a cluster do not fit into what pairs leave of an odd number of pairs."""
    for rows in (8, 64, 512, 4096):
        plan = make_plan(Shapes(4, 1, rows, 4096, (4096,)))
        assert plan is not None
        assert plan.tiles.share != "both"
