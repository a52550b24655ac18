"""Numbers of the chunk matmul, on the CPU: Mosaic's interpreter runs threads, copies and barriers.

It also detects races. The chunks around those that are read are NaN, and results are random numbers
at first: so an element that is read from another chunk, or is not written, shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul import chunk_matmul
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import (
    Rows,
    contract_chunks,
    multiply_chunks,
)
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    SHARED_MEMORY_BYTES,
    MatmulProblem,
    Tiling,
)
from collective_matmul.operands.multiply import contract
from collective_matmul.ops.matmul.backends import BACKENDS
from tests.ops.matmul.requests import request_of
from tests.reference import AXIS

INTERPRETER: Any = getattr(mosaic_gpu, "InterpretGPUParams", None)
needs_interpreter = pytest.mark.skipif(
    INTERPRETER is None, reason=f"jax {jax.__version__} has no public interpreter of GPU kernels"
)
pytestmark = needs_interpreter

TILING = Tiling(128, 128, max_concurrent_steps=3, epilogue_stages=1, cluster_dimension=None)

UseTiling = Callable[[Tiling], None]
Draw = Callable[..., np.ndarray]


@pytest.fixture
def use_tiling(_without_races: None, monkeypatch: pytest.MonkeyPatch) -> UseTiling:
    """Makes the kernel run in the interpreter, with a given tiling.

    There are two blocks or one cluster, so that each block visits several tiles and uses its stages
    several times.
    """

    def use(tiling: Tiling) -> None:
        blocks = max(2, math.prod(tiling.cluster))
        target = device.Target(blocks, interpreter())
        monkeypatch.setattr(device, "target", lambda: target)

        def choose_tiling(problem: MatmulProblem) -> Tiling:
            assert problem.fits(tiling) and tiling.shared_memory_bytes <= SHARED_MEMORY_BYTES
            return tiling

        monkeypatch.setattr(chunk_matmul, "choose_tiling", choose_tiling)

    return use


def interpreter() -> Any:
    """Returns an interpreter that detects races. Without registers, it ignores fences."""
    return INTERPRETER(detect_races=True, inline_mgpu="ignore")


def drawing(dtype: str) -> Draw:
    """Returns a function that draws an array of a shape."""
    generator = np.random.default_rng(0)
    return lambda *shape: generator.standard_normal(shape).astype(jnp.dtype(dtype))


def among_nans(value: np.ndarray, number: int, count: int, dimension: int) -> Rows:
    """Returns `value` as chunk `number` of `count`; the other chunks are NaN."""
    parts = [np.full_like(value, math.nan)] * count
    parts[number] = value
    return rows_of(np.concatenate(parts, dimension), number, count, dimension)


def rows_of(array: Any, number: int, count: int, dimension: int) -> Rows:
    """Returns chunk `number` of `count` of an array. As in rings, its start is traced."""
    size = array.shape[dimension] // count
    return Rows(jnp.asarray(array), jnp.int32(number * size), size)


def block_among_nans(rows: Rows, number: int, count: int) -> Rows:
    """Returns all columns of `rows` as block `number` of `count`; the other blocks are NaN."""
    value = np.asarray(rows.array)
    array = among_nans(value, number, count, value.ndim - 1).array
    return rows._replace(array=array, column_block=jnp.int32(number), column_blocks=count)


def assert_sum_of_products(
    actual: np.ndarray,
    pairs: Iterable[tuple[np.ndarray, np.ndarray]],
    roundings: int = 1,
) -> None:
    """Asserts ``actual = sum of x @ w over pairs``, up to the rounding of float32 sums.

    A sum of n terms in float32 is off by at most γ = n u / (1 - n u) of the sum of magnitudes, with
    u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Each rounding to
    the result's dtype adds at most half a unit in its last place.
    """
    expected, magnitude, terms = np.zeros(actual.shape), np.zeros(actual.shape), 0
    for x, w in pairs:
        x, w = x.astype(np.float64), w.astype(np.float64)
        expected, magnitude, terms = expected + x @ w, magnitude + abs(x) @ abs(w), terms + len(w)
    gamma = terms * 2**-24 / (1 - terms * 2**-24)
    bound = (1 + gamma) * (1 + float(jnp.finfo(actual.dtype).eps) / 2) ** roundings - 1
    wrong = ~(abs(actual.astype(np.float64) - expected) <= bound * magnitude)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, the first at {np.argwhere(wrong)[0]}"


@dataclass(frozen=True)
class Multiply:
    """A call of `multiply_chunks`.

    Attributes:
      size: rows of a chunk.
      contracted: K of each term.
      columns: N of each result.
      read: which chunk of the xs, and of how many.
      written: which chunk of the results, and of how many.
      lead: sizes of the dimensions before the chunks' dimension.
      trail: sizes of the dimensions between it and the columns.
      read_block: which block of the xs' columns, and of how many.
      written_block: which block of the results' columns, and of how many.
    """

    size: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    read: tuple[int, int] = (0, 1)
    written: tuple[int, int] = (0, 1)
    lead: tuple[int, ...] = ()
    trail: tuple[int, ...] = ()
    read_block: tuple[int, int] = (0, 1)
    written_block: tuple[int, int] = (0, 1)
    transpose_w: bool = False
    dtype: str = "bfloat16"
    tiling: Tiling = TILING


# Neither rows nor columns fill the last tile.
MULTIPLIES = {
    "several results": Multiply(
        72,
        (192,),
        (320, 192),
        written=(1, 3),
        tiling=replace(TILING, grid_minor_dim="n", grid_tile_width=2),
    ),
    "two epilogue stages": Multiply(
        136, (128,), (192,), (2, 3), dtype="float16", tiling=replace(TILING, epilogue_stages=2)
    ),
    "several terms": Multiply(72, (64, 192), (320,), (1, 2), transpose_w=True),
    "dimensions around": Multiply(24, (64,), (192, 64), (1, 2), (2, 3), lead=(2,), trail=(3,)),
    "parts side by side": Multiply(
        264, (128,), (192,), (0, 2), tiling=replace(TILING, wg_dimension="n")
    ),
    "tall tiles": Multiply(
        264, (64,), (192,), written=(0, 2), transpose_w=True, tiling=replace(TILING, tile_m=256)
    ),
    # Half a stage of the contraction is empty.
    "224 columns": Multiply(
        136, (96,), (480,), (1, 2), tiling=replace(TILING, tile_n=224, swizzle=64)
    ),
    "a cluster along the rows": Multiply(
        296,
        (128, 64),
        (192, 128),
        (1, 2),
        transpose_w=True,
        tiling=replace(TILING, cluster_dimension="m"),
    ),
    "a cluster along the columns": Multiply(
        72, (128,), (320, 192), written=(1, 2), tiling=replace(TILING, cluster_dimension="n")
    ),
    "a cluster along both": Multiply(
        264, (64,), (320, 64), (0, 2), tiling=replace(TILING, cluster_dimension="mn")
    ),
    "a block of the columns of x": Multiply(
        72, (64, 128), (192,), (1, 2), transpose_w=True, read_block=(1, 3)
    ),
    "a block of the results' columns": Multiply(
        72, (192,), (256, 128), written=(1, 2), trail=(2,), written_block=(2, 3)
    ),
    "blocks of both": Multiply(
        136,
        (64,),
        (256,),
        read_block=(0, 2),
        written_block=(1, 2),
        tiling=replace(TILING, cluster_dimension="n"),
    ),
}


def with_exhaustive(cases: dict[str, Any], *names: str) -> list[Any]:
    """The cases; those of these names, whose features others have too, are exhaustive."""
    assert {*names} <= cases.keys()
    marks = {name: pytest.mark.exhaustive for name in names}
    return [pytest.param(cases[n], id=n, marks=marks.get(n, ())) for n in cases]


@pytest.mark.parametrize(
    "case",
    with_exhaustive(
        MULTIPLIES,
        "a cluster along the columns",
        "a block of the columns of x",
        "a block of the results' columns",
        "parts side by side",
    ),
)
def test_multiply_chunks(case: Multiply, use_tiling: UseTiling) -> None:
    use_tiling(case.tiling)
    draw, dimension = drawing(case.dtype), len(case.lead)

    def draw_chunks(count: int, columns: int) -> np.ndarray:
        return draw(*case.lead, count * case.size, *case.trail, columns)

    xs = [draw_chunks(1, k) for k in case.contracted]
    ws = [[draw(k, n) for n in case.columns] for k in case.contracted]
    number, count = case.written
    block, blocks = case.written_block
    before = [draw_chunks(count, blocks * n) for n in case.columns]
    results = multiply_chunks(
        [block_among_nans(among_nans(x, *case.read, dimension), *case.read_block) for x in xs],
        [[jnp.asarray(w.T if case.transpose_w else w) for w in term] for term in ws],
        [
            rows_of(out, number, count, dimension)._replace(
                column_block=jnp.int32(block), column_blocks=blocks
            )
            for out in before
        ],
        dimension=dimension,
        transpose_w=case.transpose_w,
    )
    assert results is not None
    for q, result in enumerate(results):
        parts, untouched = (
            [
                part
                for rows in np.split(array, count, dimension)
                for part in np.split(rows, blocks, -1)
            ]
            for array in (np.asarray(result), before[q])
        )
        pairs = ((x, term[q]) for x, term in zip(xs, ws, strict=True))
        assert_sum_of_products(parts.pop(number * blocks + block), pairs)
        untouched.pop(number * blocks + block)
        assert [part.tobytes() for part in parts] == [part.tobytes() for part in untouched]


@dataclass(frozen=True)
class Contract:
    """A call of `contract_chunks`: one side is one array, the other an array for each chunk.

    Attributes:
      gathered: the side that consists of several arrays.
      size: rows of a chunk.
      rows: K.
      columns: N of each result.
      lead: sizes of the dimensions before the chunks' dimension.
      trail: sizes of the dimensions between it and the columns.
      block: which block of the columns of the one array, and of how many.
    """

    gathered: Literal["x", "y"]
    size: int
    rows: int
    columns: tuple[int, ...]
    lead: tuple[int, ...] = ()
    trail: tuple[int, ...] = ()
    block: tuple[int, int] = (0, 1)
    dtype: str = "bfloat16"
    tiling: Tiling = TILING


CONTRACTS = {
    "several results": Contract("x", 72, 192, (192, 64)),
    "dimensions around": Contract(
        "y", 24, 192, (128,), (2,), (3,), dtype="float16", tiling=replace(TILING, wg_dimension="n")
    ),
    "224 columns": Contract("x", 40, 96, (480,), tiling=replace(TILING, tile_n=224, swizzle=64)),
    "a cluster along the rows": Contract(
        "y", 72, 320, (192,), tiling=replace(TILING, cluster_dimension="m")
    ),
    "a cluster along both": Contract(
        "x", 8, 192, (320,), tiling=replace(TILING, cluster_dimension="mn")
    ),
    "a block of the columns of x": Contract("y", 24, 192, (128,), block=(1, 3)),
    "a block of the columns of y": Contract("x", 24, 192, (192, 64), block=(0, 2)),
}


@pytest.mark.parametrize("case", CONTRACTS.values(), ids=CONTRACTS)
def test_contract_chunks(case: Contract, use_tiling: UseTiling) -> None:
    use_tiling(case.tiling)
    draw, dimension = drawing(case.dtype), len(case.lead)
    # Where in the one array each of the gathered chunks belongs.
    places = (1, 2, 0)

    def draw_chunks(columns: int) -> list[np.ndarray]:
        return [draw(*case.lead, case.size, *case.trail, columns) for _ in places]

    def apart(values: list[np.ndarray]) -> list[Rows]:
        return [Rows(jnp.asarray(value), 0, case.size) for value in values]

    def together(values: list[np.ndarray]) -> list[Rows]:
        whole = np.concatenate([values[places.index(i)] for i in range(len(places))], dimension)
        chunks = [rows_of(whole, number, len(places), dimension) for number in places]
        return [block_among_nans(chunk, *case.block) for chunk in chunks]

    lay_x, lay_y = (apart, together) if case.gathered == "x" else (together, apart)
    x, ys = draw_chunks(case.rows), [draw_chunks(n) for n in case.columns]
    terms = list(zip(*map(lay_y, ys), strict=True))
    results = contract_chunks(lay_x(x), terms, dimension=dimension)
    assert results is not None
    for y, result in zip(ys, results, strict=True):
        pairs = (
            (a.reshape(-1, a.shape[-1]).T, b.reshape(-1, b.shape[-1]))
            for a, b in zip(x, y, strict=True)
        )
        assert_sum_of_products(np.asarray(result), pairs)


# Whole rings: the interpreter knows one device only, which plays those of the axis as a batch.
DEVICES, ROWS, WIDTH, HIDDEN = 2, 32, 64, 128
RING: Any = BACKENDS["ring"]


def test_gather_in_a_ring(use_tiling: UseTiling) -> None:
    """The forward of all_gather_matmul, and the weight's gradient in matmul_reduce_scatter."""
    use_tiling(TILING)
    draw = drawing("bfloat16")
    x, w = draw(DEVICES, ROWS, WIDTH), draw(DEVICES, WIDTH, HIDDEN)
    z = draw(DEVICES, DEVICES * ROWS, HIDDEN)

    def run(x, w, z):
        request = request_of("all_gather_matmul", [x], [w], keep_gathered=True)
        (y,), gathered = RING.execute(request, [x], [w])
        assert gathered is not None
        return y, *contract(z, [gathered], dimension=0)

    y, dw = jax.jit(jax.vmap(run, axis_name=AXIS))(x, w, z)
    whole = x.reshape(DEVICES * ROWS, WIDTH)
    for d in range(DEVICES):
        assert_sum_of_products(np.asarray(y[d]), [(whole, w[d])])
        assert_sum_of_products(np.asarray(dw[d]), [(z[d].T, whole)])


def test_scatter_in_a_ring(use_tiling: UseTiling) -> None:
    """The backward of all_gather_matmul."""
    use_tiling(TILING)
    draw = drawing("bfloat16")
    dy, w = draw(DEVICES, DEVICES * ROWS, HIDDEN), draw(DEVICES, WIDTH, HIDDEN)
    x = draw(DEVICES, ROWS, WIDTH)

    def run(dy, w, x):
        request = request_of("matmul_reduce_scatter", [dy], [w], transpose_w=True)
        dx, gathered = RING.execute(request, [dy], [w], x)
        assert gathered is not None
        return dx, *contract(gathered, [dy], dimension=0)

    dx, dw = jax.jit(jax.vmap(run, axis_name=AXIS))(dy, w, x)
    whole = x.reshape(DEVICES * ROWS, WIDTH)
    for d in range(DEVICES):
        mine = slice(d * ROWS, (d + 1) * ROWS)
        # A product is rounded, and again wherever it is added to another device's.
        pairs = [(dy[e, mine], w[e].T) for e in range(DEVICES)]
        assert_sum_of_products(np.asarray(dx[d]), pairs, roundings=DEVICES)
        assert_sum_of_products(np.asarray(dw[d]), [(whole.T, dy[d])])
