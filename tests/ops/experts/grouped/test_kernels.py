"""Kernels in Pallas' interpreter beside NumPy. Rows of no group are NaN, and reach no result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.ops.experts.grouped.triton_kernels import (
    Blocks,
    grouped_matmuls,
    grouped_outer,
    map_rows,
    sum_rows,
)
from collective_matmul.ops.experts.grouped.xla import XlaGrouped

#: Smaller than all sizes, which they do not divide. A kernel's blocks are powers of two.
BLOCKS = Blocks(rows=4, columns=4, contracted=2, rows_at_once=2)
#: Rows of each group: none, several tiles, less than one tile.
SIZES = np.array([0, 9, 3, 0, 1], np.int32)
ROWS, WIDTH, COLUMNS = 16, 5, 7
GROUPS, USED = len(SIZES), int(SIZES.sum())
#: The group of each row that has one.
GROUP = np.repeat(np.arange(GROUPS), SIZES)


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(seed).integers(-8, 9, shape) / 8
    return values.astype(jnp.dtype(dtype))


def poisoned(rows: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """The rows, NaN where no group needs them."""
    result = np.array(rows)
    needed = np.arange(USED) if index is None else index[:USED]
    result[np.setdiff1d(np.arange(len(rows)), needed)] = np.nan
    return result


#: Each row that is needed is read once or twice; the others once too, and are NaN.
INDEX = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 11, 8, 9, 7, 0, 10], np.int32)


#: The dtype changes the kernels' loads and stores alone, which a narrow one tests harder.
DTYPES = [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"]

# All values are multiples of 1/8 of at most 1: float32 adds their products exactly, in any order.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("indexed", "transposed", "pairs", "columns"),
    [
        (False, False, 1, None),
        (True, True, 1, None),
        (False, True, 2, None),
        (True, False, 1, (2, 7)),
    ],
)
def test_matmuls(indexed: bool, transposed: bool, pairs: int, columns: Any, dtype: str) -> None:
    xs = [drawn(ROWS, WIDTH, seed=i, dtype=dtype) for i in range(pairs)]
    ws = [drawn(GROUPS, WIDTH, COLUMNS, seed=9 + i, dtype=dtype) for i in range(pairs)]
    index = INDEX if indexed else None
    given = [poisoned(x, index) for x in xs]
    stored = [w.swapaxes(1, 2) if transposed else w for w in ws]
    others = [drawn(*w.shape, seed=20, dtype=dtype) for w in stored]
    sums = [list(zip(given, stored, strict=True)), list(zip(given, others, strict=True))]
    results = jax.jit(
        lambda sums, sizes, index: grouped_matmuls(
            sums,
            sizes,
            BLOCKS,
            index=index,
            transposed=transposed,
            columns=columns,
            dtype="float32",
            interpret=True,
        )
    )(sums, SIZES, index)
    first, end = columns or (0, COLUMNS)
    for result, matrices in zip(results, (stored, others), strict=True):
        expected = np.zeros((USED, COLUMNS))
        for x, w in zip(xs, matrices, strict=True):
            rows = (x if index is None else x[index])[:USED].astype(np.float64)
            w = (w.swapaxes(1, 2) if transposed else w).astype(np.float64)
            expected += np.einsum("mk,mkn->mn", rows, w[GROUP])
        assert result.shape == (ROWS, end - first)
        np.testing.assert_array_equal(result[:USED], expected[:, first:end])


@pytest.mark.parametrize(
    ("left_index", "right_index", "added", "parts"),
    [(None, None, False, 1), (INDEX, None, True, 1), (None, INDEX, True, 2)],
    ids=["sorted", "left by index", "two parts"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outer(left_index: Any, right_index: Any, added: bool, parts: int, dtype: str) -> None:
    lefts = [drawn(ROWS, WIDTH, seed=i, dtype=dtype) for i in range(parts)]
    rights = [drawn(ROWS, COLUMNS, seed=5 + i, dtype=dtype) for i in range(parts)]
    before = drawn(GROUPS, WIDTH, COLUMNS, seed=9, dtype=dtype) if added else None
    given = [
        OuterPart(
            poisoned(left, left_index), poisoned(right, right_index), SIZES, left_index, right_index
        )
        for left, right in zip(lefts, rights, strict=True)
    ]
    run = jax.jit(
        lambda parts, before: grouped_outer(
            parts, BLOCKS, added_to=before, dtype=dtype, interpret=True
        )
    )
    result = run(given, before)
    expected = np.zeros((GROUPS, WIDTH, COLUMNS))
    expected += 0 if before is None else before.astype(np.float64)
    for left, right in zip(lefts, rights, strict=True):
        for row in range(USED):
            x = left[row if left_index is None else left_index[row]].astype(np.float64)
            y = right[row if right_index is None else right_index[row]].astype(np.float64)
            expected[GROUP[row]] += np.outer(x, y)
    # Groups without rows have gradients too: zero, and not what was there.
    np.testing.assert_array_equal(np.asarray(result), expected.astype(jnp.dtype(dtype)))


def sum_and_product(a: jax.Array, b: jax.Array, value: jax.Array) -> tuple:
    return (a + b, a * value), a * b


MAPPED = jax.jit(
    functools.partial(map_rows, sum_and_product, results=2, row_sums=True, interpret=True)
)


@pytest.mark.parametrize("count", [0, 1, USED, ROWS])
def test_map_rows(count: int) -> None:
    a, b = (drawn(ROWS, COLUMNS, seed=i) for i in range(2))
    value = drawn(ROWS, seed=3)
    for array in (a, b, value):
        array[count:] = np.nan
    total, scaled, sums = MAPPED([a, b], [value], np.int32(count))
    assert (total.shape, scaled.shape, sums.shape) == ((ROWS, COLUMNS),) * 2 + ((ROWS,),)
    np.testing.assert_array_equal(total[:count], (a + b)[:count])
    np.testing.assert_array_equal(scaled[:count], (a * value[:, None])[:count])
    np.testing.assert_array_equal(sums[:count], (a * b).sum(1)[:count])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_rows(weighted: bool, dtype: str) -> None:
    """Rows from `USED` on are NaN, and so is every row that no token has."""
    rows = poisoned(drawn(ROWS, COLUMNS, dtype=dtype))
    places = np.random.default_rng(3).permutation(ROWS).reshape(-1, 2).astype(np.int32)
    weights = drawn(*places.shape, seed=4) if weighted else None
    operands: Any = rows, places, jnp.int32(USED), weights
    fun = functools.partial(sum_rows, dtype=rows.dtype, interpret=True)
    found = jax.jit(fun)(*operands)
    factors = np.ones(places.shape) if weights is None else weights
    there = places < USED
    terms = np.where(there[..., None], np.nan_to_num(rows.astype(np.float64))[places], 0)
    expected = (terms * factors[..., None]).sum(1).astype(rows.dtype)
    np.testing.assert_array_equal(found, expected)
    default = jax.jit(functools.partial(XlaGrouped().sum_rows, dtype=rows.dtype))(*operands)
    np.testing.assert_array_equal(default, expected)


#: From jax 0.11 on, a warning says that Pallas' backend for Triton will be removed.
lowers_triton = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
GPUS = AbstractMesh((2,), ("expert",), (AxisType.Auto,), abstract_device=H100)


def lowered(fun: Callable, *arguments: Any) -> str:
    """The module for CUDA, of kernels that are compiled there and not interpreted."""
    # From jax 0.12 on, kernels are lowered for the GPU that a mesh names if there is none here.
    with jax.sharding.use_abstract_mesh(GPUS):
        return jax.jit(fun).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def shaped(*shapes: Sequence[int], dtype: Any = jnp.bfloat16) -> list[Any]:
    return [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape in shapes]


def all_kernels(
    x: jax.Array, w: jax.Array, y: jax.Array, sizes: jax.Array, index: jax.Array
) -> Any:
    """A use of each kernel: x [S, K], w [G, K, N], y [M, N]."""
    (product,) = grouped_matmuls([[(x, w)]], sizes, Blocks(rows=64), index=index, dtype=x.dtype)
    back = grouped_matmuls(
        [[(y, w), (product, w)]], sizes, Blocks(), transposed=True, dtype=x.dtype
    )
    part = OuterPart(x, y, sizes, left_index=index)
    gradient = grouped_outer([part], Blocks(warps=4), added_to=w, dtype=x.dtype)
    mapped = map_rows(
        lambda a, b, p: ((a * b,), a * p),
        [product, y],
        [index.astype(jnp.float32)],
        sizes.sum(dtype=jnp.int32),
        results=1,
        row_sums=True,
    )
    places = jnp.stack([index] * 3, axis=1)
    weights = places.astype(jnp.float32)
    sums = sum_rows(product, places, sizes.sum(dtype=jnp.int32), weights, x.dtype)
    return back, gradient, mapped, sums


def operands(devices: int = 1) -> list[Any]:
    x, w, y = shaped((96 * devices, 136), (4 * devices, 136, 264), (128 * devices, 264))
    sizes, index = shaped((4 * devices,), (128 * devices,), dtype=jnp.int32)
    return [x, w, y, sizes, index]


@lowers_triton
def test_kernels_lower_for_cuda() -> None:
    text = lowered(all_kernels, *operands())
    for name in ("grouped_matmul", "grouped_outer", "map_rows", "sum_rows"):
        assert name in text
    assert text.count("__gpu$xla.gpu.triton") == 5


@lowers_triton
@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_lower_inside_of_shard_map(check_vma: bool) -> None:
    """Also where types say over which axes values vary, as Pallas' interpreter does not support."""
    spec = P("expert")
    mapped = jax.shard_map(
        all_kernels,
        mesh=GPUS,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )
    assert lowered(mapped, *operands(2)).count("__gpu$xla.gpu.triton") == 5
