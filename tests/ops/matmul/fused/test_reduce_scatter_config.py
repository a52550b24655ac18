"""Times that configurations of the reduce-scatter matmul kernel are predicted to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ITEMSIZE
from collective_matmul.ops.matmul.fused.config_search import LINK_BYTES_PER_MICROSECOND
from collective_matmul.ops.matmul.fused.reduce_scatter_config import (
    ReduceScatterProblem,
    ReductionKind,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_search import (
    candidate_all_reduce_configs,
    candidate_reduce_scatter_configs,
)

SCATTER = ReduceScatterProblem("scatter", 4, 1, 256, (3584,), 4096)


def predicted(problem: ReduceScatterProblem, rows: int, columns: int) -> float:
    """The fewest microseconds with tiles of this size."""
    return min(
        config.predicted_microseconds()
        for config in candidate_reduce_scatter_configs(problem)
        if (config.tiling.tile_m, config.tiling.tile_n) == (rows, columns)
    )


def reduced(devices: int, rows: int, kind: ReductionKind) -> float:
    """The fewest microseconds of an all-reduce of this kind."""
    configs = candidate_all_reduce_configs(
        ReduceScatterProblem("one_shot", devices, 1, rows, (3584,), 4096)
    )
    return min(config.predicted_microseconds() for config in configs if config.problem.kind == kind)


def test_of_two_waves_the_first_is_sent_while_the_second_is_multiplied() -> None:
    """One wave of larger tiles sends everything at its end. Of many waves, large tiles are best."""
    assert predicted(SCATTER, 128, 128) < 0.95 * predicted(SCATTER, 128, 256)
    many = replace(SCATTER, m=2048)
    assert predicted(many, 128, 256) < 0.95 * predicted(many, 128, 128)


@pytest.mark.parametrize("contracted", [64, 3584])
@pytest.mark.parametrize("rows", [8, 64, 256, 2048])
def test_no_config_is_predicted_to_outrun_its_links(rows: int, contracted: int) -> None:
    problem = replace(SCATTER, m=rows, k=(contracted,))
    sent_bytes = (problem.devices - 1) * ITEMSIZE * problem.m * problem.n
    for config in candidate_reduce_scatter_configs(problem):
        assert config.predicted_microseconds() > sent_bytes / LINK_BYTES_PER_MICROSECOND


def test_one_shot_saves_a_trip_and_two_shots_save_bytes() -> None:
    assert reduced(2, 16, "one_shot") < reduced(2, 16, "two_shot")
    assert reduced(4, 16, "one_shot") < reduced(4, 16, "two_shot")
    assert reduced(4, 1024, "two_shot") < 0.9 * reduced(4, 1024, "one_shot")


def test_two_devices_send_as_much_either_way() -> None:
    for rows in (512, 1024, 4096):
        assert reduced(2, rows, "one_shot") == pytest.approx(reduced(2, rows, "two_shot"), rel=0.1)
