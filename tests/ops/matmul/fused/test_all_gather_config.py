"""Configurations of the all-gather matmul kernel, and what they are predicted to take."""

from __future__ import annotations

import math

import pytest

from collective_matmul.hardware import HOPPER
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    ITEMSIZE,
    SHARED_MEMORY_BYTES,
    predicted_microseconds,
)
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig, AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_search import (
    candidate_all_gather_configs,
    choose_all_gather_config,
)


@pytest.mark.parametrize("rows", [4, 8, 24, 100, 128, 1000, 2048])
@pytest.mark.parametrize("contracted", [64, 192, 640, 2112, 4096])
def test_boxes_fill_a_shard(rows: int, contracted: int) -> None:
    problem = AllGatherProblem(4, 2, rows, contracted, (1024,))
    for config in candidate_all_gather_configs(problem):
        box_rows, box_columns = config.box
        assert config.slabs * config.slab_columns == contracted
        assert config.slab_columns % config.tiling.tile_k == 0
        assert config.slabs == 1 or config.slab_columns >= 512, "it is sent in small pieces"
        assert config.boxes_across * box_columns == config.slab_columns
        boxes = config.messages * config.boxes_per_message
        assert boxes * box_rows * box_columns == problem.planes * rows * contracted
        # Every slab, also of the last group, begins and ends with a message.
        size = box_rows * box_columns * config.boxes_per_message
        groups = {config.rows_per_group, rows - (config.groups - 1) * config.rows_per_group}
        assert all(0 < group <= rows for group in groups)
        assert not any(group * config.slab_columns % size for group in groups)
        # A piece is whole rows, or a part of one.
        assert box_rows % config.pieces == 0
        assert box_columns == contracted or box_rows == config.pieces
        assert config.buffers >= 2
        boxes_bytes = config.buffers * box_rows * box_columns * ITEMSIZE
        assert config.tiling.shared_memory_bytes + boxes_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("rows", "kilobytes"), [(64, 2), (128, 2), (256, 4), (512, 8), (4096, 8)])
def test_few_rows_are_sent_in_small_boxes(devices: int, rows: int, kilobytes: int) -> None:
    """Every block sends one box of each of four slabs. Many rows are fastest in large boxes."""
    configs = candidate_all_gather_configs(AllGatherProblem(devices, 1, rows, 4096, (7168,)))
    config = next(config for config in configs if config.slabs == 4)
    box_bytes = ITEMSIZE * math.prod(config.box)
    assert box_bytes == 1024 * kilobytes
    assert config.slabs * config.boxes_per_slab(rows) >= min(512, rows * 4)
    # The boxes in flight fill the shared memory that is reserved for them.
    assert config.buffers * box_bytes == 16384
    sizes = {ITEMSIZE * math.prod(other.box) for other in configs}
    assert {2048, 4096, 8192} <= sizes, "all are tried"


@pytest.mark.parametrize("rows", [256, 1024])
def test_many_rows_are_multiplied_in_large_tiles(rows: int) -> None:
    """Small tiles read their operands from shared memory more often than it can keep up with."""
    config = candidate_all_gather_configs(AllGatherProblem(4, 1, rows, 8192, (7168,)))[0]
    assert config.tiling.tile_m * config.tiling.tile_n >= 128 * 192


def test_clusters_all_fit_on_a_gpu() -> None:
    """Clusters of four do not: a GPC may have an odd number of pairs of multiprocessors."""
    for rows in (8, 64, 512, 4096):
        config = choose_all_gather_config(AllGatherProblem(4, 1, rows, 4096, (4096,)))
        assert config is not None
        assert config.tiling.cluster_dimension != "mn"


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("rows", [64, 512, 2048])
def test_a_group_of_rows_is_multiplied_at_once(devices: int, rows: int) -> None:
    """Tiles of a larger group would wait for slabs of rows that are not multiplied yet."""
    for config in candidate_all_gather_configs(AllGatherProblem(devices, 1, rows, 8192, (7168,))):
        cluster_rows = config.tiling.tile_m * config.tiling.cluster[0]
        width = min(config.grid_n, config.tiling.grid_tile_width)
        at_once = 132 // math.prod(config.tiling.cluster) // width * cluster_rows
        if config.tiles_span_shards:
            assert config.groups == 1
        else:
            assert config.rows_per_group == min(rows, at_once)


@pytest.mark.parametrize(
    ("problem", "tile", "peers_per_pass"),
    [
        (AllGatherProblem(2, 1, 64, 4096, (512,)), 64 * 64, {(1,)}),
        # All tiles in one wave.
        (AllGatherProblem(4, 1, 64, 4096, (512,)), 64 * 64, {(1, 1, 1), (3,)}),
        # A little less than a wave per chunk: the last two chunks are multiplied in the third.
        (AllGatherProblem(4, 1, 1024, 4096, (3584,)), 128 * 256, {(1, 1, 1), (1, 2)}),
        # A wave per chunk, or more.
        (AllGatherProblem(4, 1, 1024, 4096, (7168,)), 128 * 256, {(1, 1, 1)}),
        (AllGatherProblem(4, 1, 4096, 4096, (7168,)), 64 * 64, {(1, 1, 1)}),
        (AllGatherProblem(8, 1, 512, 4096, (1792,)), 128 * 256, {(1,) * 7, (3, 4), (4, 3)}),
    ],
    ids=str,
)
def test_peers_whose_tiles_are_multiplied_together_may_get_a_shard_together(
    problem: AllGatherProblem, tile: int, peers_per_pass: set[tuple[int, ...]]
) -> None:
    found: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    for config in candidate_all_gather_configs(problem):
        if config.tiling.tile_m * config.tiling.tile_n == tile:
            found[config.tiles_span_shards].add(config.peers_per_pass)
    assert found[False] == peers_per_pass
    assert found[True] <= {(problem.devices - 1,)}


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [4, 100, 1024])
def test_every_peer_gets_a_shard(devices: int, rows: int) -> None:
    for config in candidate_all_gather_configs(AllGatherProblem(devices, 1, rows, 4096, (1792,))):
        assert sum(config.peers_per_pass) == devices - 1 and min(config.peers_per_pass) > 0


MANY, FEW = AllGatherProblem(4, 1, 512, 8192, (7168,)), AllGatherProblem(4, 1, 512, 8192, (1024,))


@pytest.mark.parametrize(
    "problem",
    [MANY, FEW, AllGatherProblem(8, 1, 512, 2048, (512,))],
    ids=["many columns", "few columns", "fewer tiles than multiprocessors"],
)
def test_no_config_is_predicted_to_outrun_its_matmul_or_its_peers(
    problem: AllGatherProblem,
) -> None:
    shard_bytes = ITEMSIZE * problem.m * problem.k
    sending = (problem.devices - 1) * shard_bytes / HOPPER.link_bytes * 1e6
    for config in candidate_all_gather_configs(problem):
        predicted = config.predicted_microseconds()
        assert predicted > predicted_microseconds(config.matmul, config.tiling)
        assert predicted > sending


def test_tiles_that_span_shards_end_after_the_last_slab_has_arrived() -> None:
    """Even if the results have few columns."""
    problem = AllGatherProblem(4, 1, 512, 8192, (128,))
    sending = (problem.devices - 1) * ITEMSIZE * problem.m * problem.k
    for config in candidate_all_gather_configs(problem):
        if config.tiles_span_shards:
            assert config.predicted_microseconds() > 1e6 * sending / HOPPER.link_bytes


def test_slabs_pay_if_tiles_wait_for_rows() -> None:
    def predicted(problem: AllGatherProblem, slabs: int) -> float:
        configs = [
            config
            for config in candidate_all_gather_configs(problem)
            if config.slabs == slabs and not config.tiles_span_shards
        ]
        return min(map(AllGatherConfig.predicted_microseconds, configs))

    assert predicted(FEW, 4) < 0.95 * predicted(FEW, 1)
    assert predicted(MANY, 4) < predicted(MANY, 16)


def test_tiles_that_span_shards_crowd_the_links() -> None:
    """Several peers send to a device at once, unless there are two devices."""

    def loss(devices: int) -> float:
        problem = AllGatherProblem(devices, 1, 4096 // devices, 8192, (8192 // devices,))
        spanning, apart = (
            min(
                config.predicted_microseconds()
                for config in candidate_all_gather_configs(problem)
                if config.tiles_span_shards == spans
            )
            for spans in (True, False)
        )
        return spanning / apart

    assert loss(2) < 1.15 < loss(4)
