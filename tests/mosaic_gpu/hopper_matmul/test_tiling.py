"""Which tiling a matmul gets, and that the kernel can be built from all measured ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from collective_matmul import data
from collective_matmul.mosaic_gpu.hopper_matmul import tiling as module
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    SHARED_MEMORY_BYTES,
    MatmulProblem,
    MeasuredTiling,
    Tiling,
    candidate_tilings,
    choose_tiling,
    predicted_microseconds,
)

MEASURED = module.measured_tilings()
UNMEASURED = (
    MatmulProblem(1, 768, (1536,), (1280,)),
    MatmulProblem(2, 768, (1536,), (1280, 320)),
    MatmulProblem(1, 768, (1536, 192), (1280,), w_contracted_axis=2),
    MatmulProblem(1, 1536, (768,) * 3, (1280,), contracted_planes=2, x_contracted_axis=1),
    MatmulProblem(1, 8, (32,), (32,)),
)

every_measured = pytest.mark.parametrize("problem", MEASURED, ids=str)
every_unmeasured = pytest.mark.parametrize("problem", UNMEASURED, ids=str)


def assert_fits(problem: MatmulProblem, tiling: Tiling) -> None:
    """Checks what the kernel takes for granted."""
    assert tiling.shared_memory_bytes <= SHARED_MEMORY_BYTES
    assert problem.can_swizzle(tiling)
    # The stage of a step is free again once the step after it has begun.
    assert tiling.max_concurrent_steps >= 2
    assert tiling.epilogue_stages <= tiling.epilogue_tiles_per_warpgroup
    # wgmma multiplies 64 rows, and a warpgroup's registers hold 64 × 256 sums.
    rows, columns = tiling.warpgroup_tile
    assert rows % 64 == 0 and columns <= 256 and rows * columns <= 64 * 256


def test_every_record_is_of_another_problem() -> None:
    table = data.shipped("NVIDIA H200", "matmul_tilings")
    assert table is not None
    assert len(MEASURED) == len(table.records) > 50


@every_measured
def test_measured_tilings_fit(problem: MatmulProblem) -> None:
    tiling, microseconds, xla_microseconds = MEASURED[problem]
    assert_fits(problem, tiling)
    assert microseconds > 0 and xla_microseconds > 0


@every_measured
def test_a_measured_problem_gets_its_tiling(problem: MatmulProblem) -> None:
    tiling, microseconds, xla_microseconds = MEASURED[problem]
    if microseconds < xla_microseconds:
        assert choose_tiling(problem) == tiling
    else:
        assert choose_tiling(problem) in (tiling, None)


# One pass over 2048 × 8192 results reads and writes 67 MB, which takes an H200 some 20 µs; over
# 8192 × 8192 elements of gathered chunks, 80 µs.
@pytest.mark.parametrize(
    ("problem", "copying"),
    [
        (MatmulProblem(1, 2048, (64,), (8192,)), 20),
        (MatmulProblem(2, 1024, (64,), (8192, 64)), 20),
        (MatmulProblem(1, 64, (2048,) * 4, (8192,), x_contracted_axis=1), 80),
        (MatmulProblem(1, 64, (1024,) * 4, (8192,), contracted_planes=2, x_contracted_axis=1), 80),
    ],
    ids=str,
)
def test_xla_is_taken_where_it_wins_with_its_copies(
    problem: MatmulProblem, copying: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for xla, expected in ((1000 - 0.8 * copying, Tiling()), (1000 - 1.2 * copying, None)):
        measured = {problem: MeasuredTiling(Tiling(), 1000.0, xla)}
        monkeypatch.setattr(module, "measured_tilings", lambda found=measured: found)
        assert choose_tiling(problem) == expected


@every_unmeasured
def test_an_unmeasured_problem_gets_the_best_by_prediction(problem: MatmulProblem) -> None:
    assert problem not in MEASURED
    chosen = choose_tiling(problem)
    assert chosen is not None
    found = candidate_tilings(problem)
    assert predicted_microseconds(problem, chosen) == min(
        predicted_microseconds(problem, tiling) for tiling in found
    )


@every_unmeasured
def test_candidates_fit_and_differ(problem: MatmulProblem) -> None:
    found = candidate_tilings(problem)
    assert len(set(found)) == len(found)
    for tiling in found:
        assert_fits(problem, tiling)
        assert tiling.swizzle == 128 or not problem.can_swizzle(replace(tiling, swizzle=128))
        deeper = replace(tiling, max_concurrent_steps=tiling.max_concurrent_steps + 1)
        assert tiling.max_concurrent_steps == 6 or deeper.shared_memory_bytes > SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    "problem",
    [
        MatmulProblem(1, 100, (128,), (128,)),
        MatmulProblem(1, 128, (100,), (128,)),
        MatmulProblem(1, 128, (128, 48), (128,)),
        MatmulProblem(1, 128, (128,), (128, 48)),
        MatmulProblem(1, 128, (128,), (100,), w_contracted_axis=2),
        MatmulProblem(1, 128, (100,), (128,), x_contracted_axis=1),
        MatmulProblem(1, 104, (128,), (128,), x_contracted_axis=1),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_copied_get_none(problem: MatmulProblem) -> None:
    assert candidate_tilings(problem) == []
    assert choose_tiling(problem) is None


def test_ragged_sizes_get_a_tiling() -> None:
    """Rows in eights and columns in swizzles: tiles need not be full."""
    assert choose_tiling(MatmulProblem(1, 8, (32,), (96,))) is not None
    assert choose_tiling(MatmulProblem(1, 96, (8,), (32,), x_contracted_axis=1)) is not None


def test_time_goes_by_waves() -> None:
    """Tiles, one on each multiprocessor, take as long as a single one."""
    tiling = Tiling(128, 256, cluster_dimension=None)

    def predicted(rows: int, batch: int = 1) -> float:
        return predicted_microseconds(MatmulProblem(batch, rows, (640,), (256,)), tiling, 100)

    one, two, three = (predicted(count * 128) for count in (100, 101, 201))
    assert predicted(8) == one < two < three
    assert three - two == pytest.approx(two - one)
    assert predicted(128, batch=101) == two


def test_time_grows_with_the_contraction_and_the_tile() -> None:
    problem, tiling = MatmulProblem(1, 256, (640,), (256,)), Tiling(cluster_dimension=None)
    longer = [
        replace(problem, k=(1280,)),
        replace(problem, k=(640, 640)),
        replace(problem, contracted_planes=2),
    ]
    (doubled,) = {predicted_microseconds(p, tiling) for p in longer}
    assert doubled > predicted_microseconds(problem, tiling)
    assert predicted_microseconds(problem, replace(tiling, tile_n=128)) < predicted_microseconds(
        problem, tiling
    )


@pytest.mark.parametrize(("dimension", "blocks"), [(None, 1), ("m", 2), ("n", 2), ("mn", 4)])
def test_a_cluster_covers_neighbouring_tiles(
    dimension: Literal["m", "n", "mn"] | None, blocks: int
) -> None:
    """Two along m multicast w, two along n multicast x; blocks past the end are idle."""
    blocks_down, blocks_across = Tiling(cluster_dimension=dimension).cluster
    assert blocks_down * blocks_across == blocks

    def predicted(down: int, across: int, clusters: int) -> float:
        problem = MatmulProblem(1, 128 * down, (64,), (256 * across,))
        return predicted_microseconds(
            problem, Tiling(cluster_dimension=dimension), clusters * blocks
        )

    one_wave = predicted(blocks_down, blocks_across, 1)
    assert predicted(3 * blocks_down, 2 * blocks_across, 6) == one_wave
    assert predicted(blocks_down + 1, blocks_across, 2) == one_wave
    assert predicted(blocks_down + 1, blocks_across, 1) > one_wave
    assert predicted(blocks_down + 1, 2 * blocks_across, 3) > one_wave
    assert predicted(blocks_down, blocks_across + 1, 1) > one_wave


@pytest.mark.parametrize("problem", [*[*MEASURED][:3], *UNMEASURED], ids=str)
def test_a_record_is_read_as_written(problem: MatmulProblem) -> None:
    tiling = Tiling(
        256, 128, swizzle=64, wg_dimension="n", cluster_dimension=None, grid_tile_width=3
    )
    measured = MeasuredTiling(tiling, 1.5, 2.5)
    written = data.MeasuredData("matmul_tilings", "NVIDIA H200", [measured.record(problem)])
    (record,) = data.MeasuredData.from_text(written.to_text()).records
    assert MatmulProblem.from_json(record.problem) == problem
    assert MeasuredTiling.from_record(record) == measured


def test_warpgroup_and_epilogue_tiles() -> None:
    assert Tiling(128, 256, wg_dimension="m").warpgroup_tile == (64, 256)
    assert Tiling(128, 256, wg_dimension="n").warpgroup_tile == (128, 128)
    assert (Tiling(128, 256).epilogue_tile_n, Tiling(128, 256).epilogue_tiles_per_warpgroup) == (
        64,
        4,
    )
    assert (Tiling(128, 224).epilogue_tile_n, Tiling(128, 224).epilogue_tiles_per_warpgroup) == (
        32,
        7,
    )
    # Four stages of (128 + 256) × 64 elements, two epilogue tiles of 64 × 64 for each consumer.
    assert Tiling().shared_memory_bytes == 2 * (4 * 384 * 64 + 2 * 2 * 64 * 64)
