"""Which tiles a matmul gets, and that the kernel can be built from all that are tuned."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Literal

import pytest

from collective_matmul.mosaic_gpu import tiling as module
from collective_matmul.mosaic_gpu.tiling import (
    SHARED_MEMORY_BYTES,
    Problem,
    Tiles,
    as_json,
    candidates,
    choose_tiles,
    predicted_microseconds,
)

TUNED = module._tuned()
UNTUNED = (
    Problem(1, 768, (1536,), (1280,)),
    Problem(2, 768, (1536,), (1280, 320)),
    Problem(1, 768, (1536, 192), (1280,), w_contracted=2),
    Problem(1, 1536, (768,) * 3, (1280,), contracted_planes=2, x_contracted=1),
    Problem(1, 8, (32,), (32,)),
)

every_tuned = pytest.mark.parametrize("problem", TUNED, ids=str)
every_untuned = pytest.mark.parametrize("problem", UNTUNED, ids=str)


def assert_fits(problem: Problem, tiles: Tiles) -> None:
    """What the kernel takes for granted."""
    assert tiles.shared_memory_bytes <= SHARED_MEMORY_BYTES
    assert problem.swizzles(tiles)
    # The stage of a step is free again once the step after it has begun.
    assert tiles.stages >= 2
    assert tiles.strips <= tiles.all_strips
    # wgmma multiplies 64 rows, and a warpgroup's registers hold 64 × 256 sums.
    rows, columns = tiles.part
    assert rows % 64 == 0 and columns <= 256 and rows * columns <= 64 * 256


def test_every_line_is_a_problem_of_its_own() -> None:
    table = resources.files("collective_matmul.data").joinpath("h200/matmul_tilings.jsonl")
    assert len(TUNED) == len(table.read_text().splitlines()) > 0


@every_tuned
def test_tuned_tiles_fit(problem: Problem) -> None:
    tiles, microseconds, library_microseconds = TUNED[problem]
    assert_fits(problem, tiles)
    assert microseconds > 0 and library_microseconds > 0


@every_tuned
def test_a_tuned_problem_gets_its_tiles(problem: Problem) -> None:
    tiles, microseconds, library_microseconds = TUNED[problem]
    if microseconds < library_microseconds:
        assert choose_tiles(problem) == tiles
    else:
        assert choose_tiles(problem) in (tiles, None)


# One pass over 2048 × 8192 results reads and writes 67 MB, which takes an H200 some 20 µs; over
# 8192 × 8192 elements of gathered chunks, 80 µs.
@pytest.mark.parametrize(
    ("problem", "copying"),
    [
        (Problem(1, 2048, (64,), (8192,)), 20),
        (Problem(2, 1024, (64,), (8192, 64)), 20),
        (Problem(1, 64, (2048,) * 4, (8192,), x_contracted=1), 80),
        (Problem(1, 64, (1024,) * 4, (8192,), contracted_planes=2, x_contracted=1), 80),
    ],
    ids=str,
)
def test_the_library_is_taken_where_it_wins_with_its_copies(
    problem: Problem, copying: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, expected in ((1000 - 0.8 * copying, Tiles()), (1000 - 1.2 * copying, None)):
        monkeypatch.setattr(module, "_tuned", lambda: {problem: (Tiles(), 1000.0, library)})  # noqa: B023
        assert choose_tiles(problem) == expected


@every_untuned
def test_an_untuned_problem_gets_the_best_by_prediction(problem: Problem) -> None:
    assert problem not in TUNED
    chosen = choose_tiles(problem)
    assert chosen is not None
    found = candidates(problem)
    assert predicted_microseconds(problem, chosen) == min(
        predicted_microseconds(problem, tiles) for tiles in found
    )


@every_untuned
def test_candidates_fit_and_differ(problem: Problem) -> None:
    found = candidates(problem)
    assert len(set(found)) == len(found)
    for tiles in found:
        assert_fits(problem, tiles)
        assert tiles.swizzle == 128 or not problem.swizzles(replace(tiles, swizzle=128))
        deeper = replace(tiles, stages=tiles.stages + 1)
        assert tiles.stages == 6 or deeper.shared_memory_bytes > SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 100, (128,), (128,)),
        Problem(1, 128, (100,), (128,)),
        Problem(1, 128, (128, 48), (128,)),
        Problem(1, 128, (128,), (128, 48)),
        Problem(1, 128, (128,), (100,), w_contracted=2),
        Problem(1, 128, (100,), (128,), x_contracted=1),
        Problem(1, 104, (128,), (128,), x_contracted=1),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_copied_get_none(problem: Problem) -> None:
    assert candidates(problem) == []
    assert choose_tiles(problem) is None


def test_ragged_sizes_get_tiles() -> None:
    """Rows in eights and columns in swizzles: tiles need not be full."""
    assert choose_tiles(Problem(1, 8, (32,), (96,))) is not None
    assert choose_tiles(Problem(1, 96, (8,), (32,), x_contracted=1)) is not None


def test_time_goes_by_waves() -> None:
    """As many tiles as multiprocessors take as long as one."""
    tiles = Tiles(128, 256, share=None)

    def predicted(rows: int, batch: int = 1) -> float:
        return predicted_microseconds(Problem(batch, rows, (640,), (256,)), tiles, 100)

    one, two, three = (predicted(count * 128) for count in (100, 101, 201))
    assert predicted(8) == one < two < three
    assert three - two == pytest.approx(two - one)
    assert predicted(128, batch=101) == two


def test_time_grows_with_the_contraction_and_the_tile() -> None:
    problem, tiles = Problem(1, 256, (640,), (256,)), Tiles(share=None)
    longer = [
        replace(problem, contracted=(1280,)),
        replace(problem, contracted=(640, 640)),
        replace(problem, contracted_planes=2),
    ]
    (doubled,) = {predicted_microseconds(p, tiles) for p in longer}
    assert doubled > predicted_microseconds(problem, tiles)
    assert predicted_microseconds(problem, replace(tiles, columns=128)) < predicted_microseconds(
        problem, tiles
    )


@pytest.mark.parametrize(("share", "tiles"), [(None, 1), ("w", 2), ("x", 2), ("both", 4)])
def test_a_cluster_covers_neighbouring_tiles(
    share: Literal["x", "w", "both"] | None, tiles: int
) -> None:
    """Two along the rows share w, two along the columns x; blocks past the end are idle."""
    blocks_down, blocks_across = Tiles(share=share).cluster
    assert blocks_down * blocks_across == tiles

    def predicted(down: int, across: int, clusters: int) -> float:
        problem = Problem(1, 128 * down, (64,), (256 * across,))
        return predicted_microseconds(problem, Tiles(share=share), clusters * tiles)

    one_wave = predicted(blocks_down, blocks_across, 1)
    assert predicted(3 * blocks_down, 2 * blocks_across, 6) == one_wave
    assert predicted(blocks_down + 1, blocks_across, 2) == one_wave
    assert predicted(blocks_down + 1, blocks_across, 1) > one_wave
    assert predicted(blocks_down + 1, 2 * blocks_across, 3) > one_wave
    assert predicted(blocks_down, blocks_across + 1, 1) > one_wave


@pytest.mark.parametrize("problem", [*[*TUNED][:3], *UNTUNED], ids=str)
def test_a_line_is_read_as_written(problem: Problem) -> None:
    tiles = Tiles(256, 128, swizzle=64, split="columns", share=None, sweep_width=3)
    line = as_json(problem, tiles, microseconds=1.5, library_microseconds=2.5)
    assert "\n" not in line
    assert module._entry(json.loads(line)) == (problem, (tiles, 1.5, 2.5))


def test_parts_and_strips() -> None:
    assert Tiles(128, 256, split="rows").part == (64, 256)
    assert Tiles(128, 256, split="columns").part == (128, 128)
    assert (Tiles(128, 256).strip_columns, Tiles(128, 256).all_strips) == (64, 4)
    assert (Tiles(128, 224).strip_columns, Tiles(128, 224).all_strips) == (32, 7)
    # Four stages of (128 + 256) × 64 elements, two strips of 64 × 64 for each of two consumers.
    assert Tiles().shared_memory_bytes == 2 * (4 * 384 * 64 + 2 * 2 * 64 * 64)
