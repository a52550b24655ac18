"""The kernel that multiplies rows by weights in 8 bits: interpreted, lowered, and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from collective_matmul._compat import MULTIPLIES_MIXED_FP8
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.scaled import scaled_chunks
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Op
from tests.dispatch.sites import site_of
from tests.fp8_reference import SHIPPED_RECIPES
from tests.hopper import skip_without_hopper
from tests.mosaic_gpu.hopper_matmul.test_interpreted import interpreter, needs_interpreter

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
#: Tensor cores add the products of an instruction, 32 of them and the sum so far, with 13 bits
#: after the point of the largest.
HOPPER_ULP = 33 * 2.0**-13

needs_blocks = pytest.mark.needs("blockwise")
needs_mixed = pytest.mark.skipif(
    not MULTIPLIES_MIXED_FP8, reason="Mosaic multiplies operands of two dtypes from jax 0.11 on"
)


def rows_of(fp8: str, xs: Any, dtype: str) -> Any:
    """Packed rows of arrays, whose values have this dtype."""
    recipe: Any = FORMATS[fp8]
    packed = dataclasses.replace(recipe, dtype=jnp.dtype(dtype)).rows(xs)
    return [rows.without_array for rows in packed]


@dataclass(frozen=True)
class Products:
    """A call of `multiply_chunks`.

    Attributes:
      fp8: the recipe.
      dtype: of the rows.
      size: rows of a chunk.
      contracted: K of each term.
      columns: N of each result.
      chunks: of the rows, of which the last is read. The second of three is written.
      lead: sizes of the dimensions before the chunks' dimension.
    """

    fp8: str
    size: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    dtype: str = E4M3
    chunks: int = 1
    lead: tuple[int, ...] = ()

    def __str__(self) -> str:
        k, n = ("+".join(map(str, sizes)) for sizes in (self.contracted, self.columns))
        return f"{self.fp8}-{self.dtype}-{self.size}x{k}x{n}-{self.chunks}-{self.lead}"

    def operands(self, edit: Callable[[np.ndarray], None] = lambda x: None) -> tuple[Any, Any]:
        """Packed rows, and weights [p][q]; `edit` changes the first x."""
        draw = np.random.default_rng(3).standard_normal
        recipe: Any = FORMATS[self.fp8]
        shape = (*self.lead, self.chunks * self.size)
        xs = [draw((*shape, k)).astype(jnp.bfloat16) for k in self.contracted]
        edit(xs[0])
        ws = [[draw((k, n)).astype(jnp.bfloat16) for k in self.contracted] for n in self.columns]
        scaled = [recipe.matrices(terms) for terms in ws]
        terms = [[each[p] for each in scaled] for p in range(len(xs))]
        return rows_of(self.fp8, xs, self.dtype), terms

    def multiply(self, rows: Any, ws: Any) -> tuple[jax.Array, ...]:
        """The results, NaN where nothing was written."""
        return self.program()(rows, ws)

    def program(self) -> Callable[[Any, Any], tuple[jax.Array, ...]]:
        """The compiled function of `multiply`. Each one is lowered anew."""
        size, dimension = self.size, len(self.lead)

        def run(rows: Any, ws: Any) -> Any:
            places = [Rows(x, jnp.int32((self.chunks - 1) * size), size) for x in rows]
            shapes = [(*self.lead, 3 * size, n) for n in self.columns]
            nans = [jnp.full(shape, math.nan, jnp.bfloat16) for shape in shapes]
            outs = [Rows(nan, jnp.int32(size), size) for nan in nans]
            return scaled_chunks.multiply_chunks(places, ws, outs, dimension=dimension)

        return jax.jit(run)

    def assert_right(self, results: Any, rows: Any, ws: Any, ulp: float) -> None:
        """Asserts that only the chunk was written, and that each sum of products is right.

        Args:
          results: of `multiply`.
          rows: the operands.
          ws: the operands.
          ulp: the error of the sums relative to that of their terms' magnitudes.
        """
        size = self.size
        for q, result in enumerate(results):
            before, here, after = np.split(np.asarray(result, np.float64), 3, len(self.lead))
            assert np.isnan(before).all() and np.isnan(after).all()
            expected, magnitude = np.zeros(here.shape), np.zeros(here.shape)
            for packed, term in zip(rows, ws, strict=True):
                x, w = _wide(packed.dequantized())[..., -size:, :], _wide(term[q].dequantized())
                expected, magnitude = expected + x @ w, magnitude + abs(x) @ abs(w)
            bound = (ulp + 2.0**-8) * magnitude
            np.testing.assert_array_equal(np.isnan(here), np.isnan(expected))
            assert (abs(here - expected)[~np.isnan(here)] <= bound[~np.isnan(here)]).all()


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.fixture
def _interpreted(_without_races: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = device.Target(2, interpreter())
    monkeypatch.setattr(device, "target", lambda: target)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "products",
    [
        Products("rowwise", 136, (256,), (320,), chunks=2),
        pytest.param(
            Products("tensorwise", 64, (128, 256), (192, 64), E5M2, lead=(2,)), marks=needs_mixed
        ),
        pytest.param(
            Products("blockwise", 136, (256,), (320,), chunks=2),
            marks=[needs_blocks, pytest.mark.exhaustive],
        ),
        pytest.param(
            Products("blockwise", 72, (128, 256), (192, 64), E5M2, lead=(2,)),
            marks=[needs_blocks, needs_mixed],
        ),
        Products("rowwise", 8, (768,), (64,), chunks=2),
        # Whole tiles, whose scales are read from the message.
        Products("rowwise", 256, (128,), (64,), chunks=2),
        pytest.param(Products("blockwise", 128, (256,), (64,), chunks=2), marks=needs_blocks),
    ],
    ids=str,
)
def test_chunks_are_multiplied_in_place(products: Products) -> None:
    operands = products.operands()
    # The interpreter adds in float32.
    products.assert_right(products.multiply(*operands), *operands, ulp=1024 * 2.0**-24)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("fp8", ["rowwise", pytest.param("blockwise", marks=needs_blocks)])
def test_nans_stay_in_their_rows(fp8: str) -> None:
    def edit(x: np.ndarray) -> None:
        x[3, 5], x[7, 0] = math.nan, math.inf
        x[11] = 0

    products = Products(fp8, 16, (128,), (64,))
    rows, ws = products.operands(edit)
    (result,) = products.multiply(rows, ws)
    rows = np.isnan(np.asarray(result, np.float32)[16:32]).any(1)
    assert list(np.flatnonzero(rows)) == [3, 7]
    assert not np.asarray(result, np.float32)[16 + 11].any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": 12}, "rows 12: not a multiple of 8"),
        ({"k": (256, 192)}, "contracted size 192: not a multiple of 128"),
        ({"n": (64, 96)}, "columns 96: not a multiple of 64"),
        ({}, None),
    ],
)
def test_shapes_that_the_kernel_cannot_multiply(changes: dict, reason: str | None) -> None:
    sizes: dict[str, Any] = {"batch": 1, "m": 16, "k": (256,), "n": (64,)} | changes
    problem = scaled_chunks.ScaledProblem(**sizes, in_blocks=False)
    assert problem.unsupported_reason() == reason


def test_few_tiles_are_narrow() -> None:
    def columns(m: int, n: int) -> int:
        return scaled_chunks.ScaledProblem(1, m, (4096,), (n,), False).tiling(132).tile_n

    assert columns(1024, 2048) == 128  # 128 tiles: one wave of half the time.
    assert columns(4096, 14336) == 256


def quantized_product(fp8: str, dtype: str) -> Callable[[Any, Any], Any]:
    def product(x: jax.Array, w: jax.Array) -> Any:
        (sent,), (scaled,) = rows_of(fp8, [x], dtype), FORMATS[fp8].matrices([w])
        return scaled_chunks.multiply(sent, scaled)

    return product


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=needs_mixed)])
def test_lowering(fp8: str, dtype: str) -> None:
    shapes = ShapeDtypeStruct((4096, 512), jnp.bfloat16), ShapeDtypeStruct((512, 320), jnp.bfloat16)
    traced = jax.jit(quantized_product(fp8, dtype)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 and "dot_general" not in text


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("product_dtype", ["float32", "bfloat16"])
def test_float32_products_are_left_to_xla(product_dtype: str) -> None:
    (w,) = FORMATS["rowwise"].matrices([jnp.ones((128, 64), product_dtype)])
    assert isinstance(w, ScaledMatrix)
    shape = jax.eval_shape(lambda x: FORMATS["rowwise"].rows([x])[0], jnp.ones((8, 128)))
    product = jax.eval_shape(lambda x: scaled_chunks.multiply(x, w), shape)
    assert (product is None) == (product_dtype == "float32")


@needs_blocks
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("op", "rows", "by_xla", "by_ring"),
    [
        ("all_gather_matmul", 24, True, False),
        ("matmul_reduce_scatter", 24, True, False),
        ("matmul_all_reduce", 24, True, False),
        ("matmul_all_reduce", 32, True, True),
        ("matmul_reduce_scatter", 12, False, False),
    ],
)
def test_xla_multiplies_whole_arrays_and_a_ring_chunks(
    op: Op, rows: int, by_xla: bool, by_ring: bool
) -> None:
    """So their rows decide which of them multiply blocks in 8 bits, and which in float32."""
    site = replace(site_of(op, rows, 4096, 14336, devices=2), format=FORMATS["blockwise"])
    for name, in_8_bits in (("xla", by_xla), ("ring", by_ring)):
        dtypes = site.operand_dtypes if in_8_bits else ("float32", "float32")
        assert BACKENDS[name].multiplied_dtypes(site) == dtypes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=needs_mixed)])
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_repeats_on_a_gpu(fp8: str, dtype: str) -> None:
    """Races would make results differ. The interpreter, which other tests use, has none."""
    skip_without_hopper()
    products = Products(fp8, 1000, (2048, 1024), (2112, 512), dtype, chunks=2)
    rows, ws = products.operands()
    multiply = products.program()
    first = multiply(rows, ws)
    steps = sum(products.contracted) // 32
    ulp = HOPPER_ULP if fp8 == "blockwise" else HOPPER_ULP * math.sqrt(steps)
    products.assert_right(first, rows, ws, ulp)
    for _ in range(200):
        for result, expected in zip(multiply(rows, ws), first, strict=True):
            np.testing.assert_array_equal(
                np.asarray(result).view(np.uint16), np.asarray(expected).view(np.uint16)
            )
