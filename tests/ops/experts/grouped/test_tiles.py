"""Tiles of rows: each row of each group is in exactly one."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from collective_matmul.ops.experts.grouped.tiles import count_tiles, tiles_of

#: Of all examples, so that few shapes are compiled.
GROUPS, ROWS = 4, 24
COMPILED = jax.jit(tiles_of, static_argnums=(1, 2))


@st.composite
def sizes_of_groups(draw: st.DrawFn) -> list[int]:
    bounds = sorted(draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS)))
    return np.diff([0, *bounds]).tolist()


@given(sizes=sizes_of_groups(), block=st.sampled_from([1, 4, 16]))
@example(sizes=[0, 0, 0, 0], block=4)
@example(sizes=[0, 0, 0, ROWS], block=4)
@example(sizes=[ROWS, 0, 0, 0], block=16)
@example(sizes=[1, 1, 1, 1], block=16)
def test_each_row_of_each_group_is_in_one_tile(sizes: list[int], block: int) -> None:
    rows = ROWS
    tiles = np.asarray(COMPILED(np.asarray(sizes, np.int32), rows, block))
    assert tiles.shape == (count_tiles(rows, len(sizes), block), 3)
    starts = np.cumsum([0, *sizes])
    found = [(int(g), r) for g, start, end in tiles for r in range(start, end)]
    expected = [(g, starts[g] + r) for g, size in enumerate(sizes) for r in range(size)]
    assert found == expected
    for group, start, end in tiles:
        assert 0 <= group < len(sizes)
        assert 0 <= end - start <= block
        # Loads of an empty tile's rows stay inside of the array too.
        assert 0 <= start <= rows


def test_the_number_of_tiles_is_the_least_that_suffices_for_any_sizes() -> None:
    """One row in every group but one, which has all others."""
    for rows, groups, block in ((9, 3, 4), (5, 8, 4), (16, 1, 4), (16, 2, 4)):
        used = min(groups, rows)
        sizes = np.zeros(groups, np.int32)
        sizes[:used] = 1
        sizes[0] += rows - used
        needed = int(np.sum(-(-sizes // block)))
        assert needed <= count_tiles(rows, groups, block) <= needed + 1
