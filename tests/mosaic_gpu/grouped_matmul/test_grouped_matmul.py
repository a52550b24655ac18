"""The grouped matmul for Hopper GPUs: interpreted on the CPU, lowered for CUDA, and on a GPU.

The interpreter detects races. It copies and stores rows one after another where a kernel does so by
threads: that code runs on GPUs alone. Rows of no group are NaN, and reach no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.grouped_matmul.group_tiles import group_tiles, most_tiles
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import (
    OuterPart,
    grouped_matmuls,
    grouped_outer,
)
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from tests.hopper import MULTIPROCESSORS, skip_without_hopper
from tests.mosaic_gpu.hopper_matmul.test_interpreted import (
    assert_sum_of_products,
    interpreter,
    needs_interpreter,
    with_exhaustive,
)

#: Rows of each group: none, more than a tile, a few in the middle of 8 rows, none, one, a tile.
SIZES = np.array([0, 90, 3, 0, 1, 66], np.int32)
#: More than the groups have.
ROWS = 168
USED, GROUPS = int(SIZES.sum()), len(SIZES)
STARTS = np.cumsum(SIZES) - SIZES

TILING = Tiling(
    64,
    128,
    max_concurrent_steps=4,
    epilogue_stages=1,
    wg_dimension="n",
    cluster_dimension=None,
    grid_tile_width=2,
)
TALL = replace(TILING, tile_m=128, wg_dimension="m")


def rows_of(group: int) -> slice:
    return slice(int(STARTS[group]), int(STARTS[group] + SIZES[group]))


def draw_rows(columns: int, seed: int, dtype: str = "bfloat16") -> np.ndarray:
    """Rows, NaN beyond those of groups."""
    values = np.random.default_rng(seed).standard_normal((ROWS, columns)).astype(jnp.dtype(dtype))
    values[USED:] = np.nan
    return values


def scattered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An array that has the rows in another order, with others between them; and their places."""
    index = np.random.default_rng(7).permutation(2 * ROWS)[:ROWS].astype(np.int32)
    array = np.full((2 * ROWS, rows.shape[1]), np.nan, rows.dtype)
    array[index] = rows
    return array, index


@dataclass(frozen=True)
class Products:
    """A call of `grouped_matmuls`.

    Attributes:
      contracted: K of each term.
      columns: N.
      results: their number.
      indexed: whether rows come by index; then there is one term.
      block: which block of the columns, and of how many.
    """

    contracted: tuple[int, ...]
    columns: int
    results: int = 1
    indexed: bool = False
    transposed: bool = False
    block: tuple[int, int] = (0, 1)
    dtype: str = "bfloat16"
    tiling: Tiling = TILING

    def check(self, target: Target) -> list[np.ndarray]:
        """Asserts that the results are right, and returns them."""
        xs = [draw_rows(k, seed, self.dtype) for seed, k in enumerate(self.contracted)]
        draw = np.random.default_rng(9).standard_normal
        number, blocks = self.block
        width = self.columns * blocks
        ws = [
            [draw((GROUPS, k, width)).astype(xs[0].dtype) for _ in range(self.results)]
            for k in self.contracted
        ]
        given, index = xs, None
        if self.indexed:
            (array, index) = scattered(xs[0])
            given = [array]
        here = slice(number * self.columns, (number + 1) * self.columns)
        results = grouped_matmuls(
            [jnp.asarray(x) for x in given],
            [[jnp.asarray(w.swapaxes(1, 2) if self.transposed else w) for w in t] for t in ws],
            jnp.asarray(SIZES),
            self.tiling,
            target,
            index=None if index is None else jnp.asarray(index),
            transposed=self.transposed,
            columns=None if blocks == 1 else (here.start, here.stop),
        )
        found = [np.asarray(result) for result in results]
        for q, result in enumerate(found):
            assert result.shape == (ROWS, self.columns)
            for g in map(int, np.flatnonzero(SIZES)):
                pairs = [(x[rows_of(g)], t[q][g][:, here]) for x, t in zip(xs, ws, strict=True)]
                assert_sum_of_products(result[rows_of(g)], pairs)
        return found


PRODUCTS = {
    "rows that follow each other": Products((128,), 192),
    "rows by index, and two results": Products((128,), 64, results=2, indexed=True),
    "two terms of transposed matrices": Products((64, 128), 64, transposed=True, dtype="float16"),
    "a block of the columns": Products((64,), 64, block=(1, 2), tiling=TALL),
    "clusters that share matrices": Products(
        (128,), 64, tiling=replace(TILING, cluster_dimension="m")
    ),
    "clusters that share rows": Products((64,), 320, tiling=replace(TILING, cluster_dimension="n")),
    "rows by index in clusters": Products(
        (64,), 64, indexed=True, transposed=True, tiling=replace(TILING, cluster_dimension="m")
    ),
    "tall tiles, columns first": Products((64,), 192, tiling=replace(TALL, grid_minor_dim="n")),
}


def interpreted(tiling: Tiling) -> Target:
    """Two blocks, or one cluster: each visits several tiles, and uses its stages several times."""
    return Target(max(2, tiling.cluster[0] * tiling.cluster[1]), interpreter())


@needs_interpreter
@pytest.mark.usefixtures("_without_races")
@pytest.mark.parametrize(
    "case",
    with_exhaustive(
        PRODUCTS,
        "a block of the columns",
        "clusters that share rows",
        "rows by index in clusters",
        "tall tiles, columns first",
    ),
)
def test_products(case: Products) -> None:
    case.check(interpreted(case.tiling))


@dataclass(frozen=True)
class Outer:
    """A call of `grouped_outer`: K, N, the number of parts, which rows come by index, whether it
    adds to an array."""

    contracted: int
    columns: int
    parts: int = 1
    left: bool = False
    right: bool = False
    adds: bool = False
    tiling: Tiling = TALL

    def check(self, target: Target) -> np.ndarray:
        """Asserts that the result is right, and returns it."""
        lefts = [draw_rows(self.contracted, seed) for seed in range(self.parts)]
        rights = [draw_rows(self.columns, 4 + seed) for seed in range(self.parts)]

        def part(left: np.ndarray, right: np.ndarray) -> OuterPart:
            left, left_index = scattered(left) if self.left else (left, None)
            right, right_index = scattered(right) if self.right else (right, None)
            return OuterPart(left, right, SIZES, left_index, right_index)

        parts = jax.tree.map(jnp.asarray, [*map(part, lefts, rights)])
        shape = GROUPS, self.contracted, self.columns
        before = np.random.default_rng(8).standard_normal(shape).astype(lefts[0].dtype)
        added_to = jnp.asarray(before) if self.adds else None
        result = np.asarray(grouped_outer(parts, self.tiling, target, added_to))
        assert result.shape == shape
        for g in range(GROUPS):
            rows = rows_of(g)
            pairs = [(x[rows].T, y[rows]) for x, y in zip(lefts, rights, strict=True)]
            if self.adds:
                pairs.append((np.eye(self.contracted), before[g]))
            # Groups without rows have gradients too: zero.
            assert_sum_of_products(result[g], pairs)
        return result


OUTERS = {
    "rows that follow each other": Outer(64, 192),
    "two parts, the left by index": Outer(64, 64, parts=2, left=True),
    "the right by index": Outer(192, 64, right=True),
    "clusters": Outer(192, 64, tiling=replace(TALL, cluster_dimension="m")),
    "added to an array": Outer(128, 256, adds=True),
}


@needs_interpreter
@pytest.mark.usefixtures("_without_races")
@pytest.mark.parametrize("case", with_exhaustive(OUTERS, "the right by index", "clusters"))
def test_outer(case: Outer) -> None:
    case.check(interpreted(case.tiling))


@pytest.mark.parametrize("sizes", [SIZES, SIZES * 0, SIZES[::-1], np.array([0, 0, ROWS], np.int32)])
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_cover_the_rows_of_groups_once(sizes: np.ndarray, block: int) -> None:
    tiles = jax.jit(group_tiles, static_argnums=(1, 2))(sizes, ROWS, block)
    used, groups, rows, bounds = (np.asarray(each) for each in tiles)
    assert used <= len(groups) <= max(1, most_tiles(ROWS, len(sizes), block))
    owners = np.full(ROWS, -1)
    for group, row in zip(groups[: used[0]], rows[: used[0]], strict=True):
        start, end = bounds[2 * group : 2 * group + 2]
        own = slice(max(8 * row, start), min(8 * row + block, end))
        assert own.start < own.stop
        assert (owners[own] == -1).all()
        owners[own] = group
    expected = np.full(ROWS, -1)
    expected[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(owners, expected)


def shaped(*sizes: int, dtype: Any = jnp.bfloat16) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(sizes, dtype)


def launches(indexed: bool, transposed: bool) -> Callable[..., Any]:
    target = Target(MULTIPROCESSORS)

    def run(x: Any, w: Any, y: Any, sizes: Any, index: Any) -> Any:
        index = index if indexed else None
        tiling = Tiling(cluster_dimension="m")
        products = grouped_matmuls(
            [x], [[w, w]], sizes, tiling, target, index=index, transposed=transposed
        )
        return products, grouped_outer([OuterPart(x, y, sizes, index)], tiling, target)

    return run


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_lowering(indexed: bool, transposed: bool) -> None:
    """Kernels and the tiles of groups, but no copies of rows."""
    k, n, groups, rows = 256, 384, 8, 1024
    w = shaped(groups, n, k) if transposed else shaped(groups, k, n)
    sizes, index = (shaped(count, dtype=jnp.int32) for count in (groups, rows))
    x = shaped(rows, k)
    traced = jax.jit(launches(indexed, transposed)).trace(x, w, shaped(rows, n), sizes, index)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "ragged_dot" not in text and "dot_general" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*PRODUCTS.values(), *OUTERS.values()], ids=str)
def test_values_and_repeats_on_a_gpu(case: Products | Outer) -> None:
    """Races would make results differ. What threads do, the interpreter does not show."""
    skip_without_hopper()
    target = device.target()
    assert target is not None
    first = np.asarray(case.check(target))
    for _ in range(50):
        again = np.asarray(case.check(target))
        used = slice(None) if isinstance(case, Outer) else slice(0, USED)
        axis = () if isinstance(case, Outer) else (slice(None),)
        np.testing.assert_array_equal(first[(*axis, used)], again[(*axis, used)])
