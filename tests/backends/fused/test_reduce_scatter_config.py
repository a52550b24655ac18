"""What the cut of the kernels that multiply and sum is predicted to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collective_matmul.backends.fused.config_search import LINK_BYTES_PER_MICROSECOND
from collective_matmul.backends.fused.reduce_scatter_config import (
    Kind,
    Shapes,
    all_reduce_candidates,
    candidates,
    predicted_plan_microseconds,
)
from collective_matmul.mosaic_gpu.tiling import ITEMSIZE

SCATTER = Shapes("scatter", 4, 1, 256, (3584,), 4096)


def predicted(shapes: Shapes, rows: int, columns: int) -> float:
    """The least of tiles so large."""
    return min(
        predicted_plan_microseconds(plan)
        for plan in candidates(shapes)
        if (plan.tiles.rows, plan.tiles.columns) == (rows, columns)
    )


def reduced(devices: int, rows: int, kind: Kind) -> float:
    """The least of an all-reduce done so."""
    plans = all_reduce_candidates(Shapes("one_shot", devices, 1, rows, (3584,), 4096))
    return min(predicted_plan_microseconds(plan) for plan in plans if plan.shapes.kind == kind)


def test_of_two_waves_the_first_is_sent_while_the_second_is_multiplied() -> None:
    """A single wave of larger tiles sends all when it ends. Of many waves, large tiles are best."""
    assert predicted(SCATTER, 128, 128) < 0.95 * predicted(SCATTER, 128, 256)
    many = replace(SCATTER, rows=2048)
    assert predicted(many, 128, 256) < 0.95 * predicted(many, 128, 128)


@pytest.mark.parametrize("contracted", [64, 3584])
@pytest.mark.parametrize("rows", [8, 64, 256, 2048])
def test_no_plan_is_predicted_to_outrun_its_links(rows: int, contracted: int) -> None:
    shapes = replace(SCATTER, rows=rows, contracted=(contracted,))
    sent_bytes = (shapes.devices - 1) * ITEMSIZE * shapes.rows * shapes.columns
    for plan in candidates(shapes):
        assert predicted_plan_microseconds(plan) > sent_bytes / LINK_BYTES_PER_MICROSECOND


def test_one_shot_saves_a_trip_and_two_steps_save_bytes() -> None:
    assert reduced(2, 16, "one_shot") < reduced(2, 16, "two_step")
    assert reduced(4, 16, "one_shot") < reduced(4, 16, "two_step")
    assert reduced(4, 1024, "two_step") < 0.9 * reduced(4, 1024, "one_shot")


def test_two_devices_send_as_much_either_way() -> None:
    for rows in (512, 1024, 4096):
        assert reduced(2, rows, "one_shot") == pytest.approx(reduced(2, rows, "two_step"), rel=0.1)
