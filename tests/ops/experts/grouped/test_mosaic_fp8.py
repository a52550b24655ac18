"""Grouped matmuls in 8 bits for Hopper GPUs: interpreted on the CPU, lowered, and on a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul._compat import MULTIPLIES_MIXED_FP8
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import SHARED_MEMORY_BYTES, Tiling
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.grouped import as_array, matrix_stacks, separate_rows
from collective_matmul.operands.multiply import multiplied
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.mosaic import MosaicGrouped
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from tests.hopper import MULTIPROCESSORS, skip_without_hopper
from tests.mosaic_gpu.conftest import _without_races  # noqa: F401
from tests.mosaic_gpu.grouped_matmul.test_grouped_matmul import GROUPS, ROWS, SIZES, USED, rows_of
from tests.mosaic_gpu.hopper_matmul.test_interpreted import (
    interpreter,
    needs_interpreter,
    with_exhaustive,
)
from tests.mosaic_gpu.hopper_matmul.test_scaled_matmul import HOPPER_ULP

MOSAIC: Any = GROUPED_BACKENDS["mosaic"]
#: Small ones, of one part in 64 rows for each warpgroup.
WIDE = Tiling(64, 256, 128, wg_dimension="n", epilogue_stages=1, cluster_dimension=None)
TALL = Tiling(128, 128, 128, epilogue_stages=1, cluster_dimension=None, grid_tile_width=2)

needs_mixed = pytest.mark.skipif(
    not MULTIPLIES_MIXED_FP8, reason="Mosaic multiplies operands of two dtypes from jax 0.11 on"
)


@dataclass(frozen=True)
class Products:
    """A product in 8 bits.

    Attributes:
      fp8: the recipe.
      contracted: K of each term.
      columns: N.
      results: their number; more than one has one term.
      indexed: whether rows come by index.
      of_gradient: whether rows are gradients, which are multiplied by transposes.
      block: which block of the columns, and of how many.
    """

    fp8: str
    contracted: int
    columns: int
    terms: int = 1
    results: int = 1
    indexed: bool = False
    of_gradient: bool = False
    block: tuple[int, int] = (0, 1)
    tiling: Tiling = TALL

    @property
    def request(self) -> GroupedRequest:
        return GroupedRequest(
            op="grouped_matmul",
            all_rows=ROWS,
            used_rows=USED,
            contracted=self.contracted,
            columns=self.columns,
            groups=GROUPS,
            dtype=np.dtype(jnp.bfloat16),
            pairs=self.terms,
            format=FORMATS[self.fp8],
            of_gradient=self.of_gradient,
        )

    def operands(self) -> tuple[Any, Any, Any]:
        """Rows, stacks of matrices by result and term, and the index."""
        generator, stored = np.random.default_rng(5), self.request.format
        index = generator.permutation(2 * ROWS)[:ROWS] if self.indexed else None
        rows = 2 * ROWS if self.indexed else ROWS
        k, n = self.contracted, self.columns

        def draw(*shape: int) -> jax.Array:
            spread = np.exp(generator.standard_normal((*shape[:-1], 1)))
            return jnp.asarray(generator.standard_normal(shape) * spread, jnp.bfloat16)

        xs = separate_rows(
            stored, [draw(rows, k) for _ in range(self.terms)], of_gradient=self.of_gradient
        )
        ws = [
            matrix_stacks(
                stored,
                [
                    draw(GROUPS, *((n, k) if self.of_gradient else (k, n)))
                    for _ in range(self.terms)
                ],
                transposed=self.of_gradient,
            )
            for _ in range(self.results)
        ]
        index = None if index is None else jnp.asarray(index, jnp.int32)
        return [*map(multiplied, xs)], ws, index

    def check(self, backend: Any, ulp: float) -> list[np.ndarray]:
        """Asserts that the results are right, and returns the rows of groups."""
        xs, ws, index = self.operands()
        request, (number, blocks) = self.request, self.block
        assert backend.multiplied_dtypes(request)[1] == "float8_e4m3fn"
        width = self.columns // blocks
        here = slice(number * width, (number + 1) * width)
        xs_in, ws_in = jax.tree.map(lambda x: x, (xs, ws))
        rows = [backend.operand(request, x) for x in xs_in]
        stacks = [[backend.operand(request, w) for w in terms] for terms in ws_in]
        sizes = jnp.asarray(SIZES)
        if self.results > 1:
            results = backend.matmuls(request, rows[0], [w for (w,) in stacks], sizes, index)
        else:
            columns = None if blocks == 1 else (here.start, here.stop)
            pairs = [*zip(rows, stacks[0], strict=True)]
            results = (backend.matmul(request, pairs, sizes, index, columns),)
        found = [np.asarray(result)[:USED] for result in results]
        order = slice(None) if index is None else np.asarray(index)
        wide_xs = [np.asarray(as_array(x, jnp.float32), np.float64)[order] for x in xs]
        for result, terms in zip(found, ws, strict=True):
            assert result.shape == (USED, width)
            wide_ws = [np.asarray(as_array(w, jnp.float32), np.float64) for w in terms]
            for g in map(int, np.flatnonzero(SIZES)):
                pairs = [
                    (x[rows_of(g)], w[g][:, here]) for x, w in zip(wide_xs, wide_ws, strict=True)
                ]
                expected = sum(x @ w for x, w in pairs)
                magnitude = sum(abs(x) @ abs(w) for x, w in pairs)
                error = abs(result[rows_of(g)].astype(np.float64) - expected)
                assert (error <= 2.0**-8 * abs(expected) + ulp * magnitude).all()
        return found


PRODUCTS = {
    "scales of rows": Products("rowwise", 256, 192),
    "rows by index, and two results": Products("rowwise", 128, 64, results=2, indexed=True),
    "two terms of gradients": Products("rowwise", 128, 128, terms=2, of_gradient=True),
    "a block of the columns": Products("rowwise", 128, 128, block=(1, 2), tiling=WIDE),
    "blocks": Products("blockwise", 256, 192, indexed=True),
    "two terms of blocks": Products("blockwise", 128, 256, terms=2, block=(1, 2), tiling=WIDE),
    "one scale": Products("tensorwise", 128, 64),
}


@needs_interpreter
@pytest.mark.usefixtures("_without_races")
@pytest.mark.parametrize(
    "case",
    with_exhaustive(
        PRODUCTS, "two terms of gradients", "a block of the columns", "two terms of blocks"
    ),
)
def test_products(case: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of one step are added exactly by the interpreter, in float32."""
    monkeypatch.setattr(device, "target", lambda: Target(2, interpreter()))
    case.check(MosaicGrouped(case.tiling), ulp=2.0**-15)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_values_and_repeats_on_a_gpu(case: Products) -> None:
    skip_without_hopper()
    for backend in (MOSAIC, MosaicGrouped(case.tiling)):
        first = case.check(backend, HOPPER_ULP)
        for _ in range(20):
            for one, other in zip(first, case.check(backend, HOPPER_ULP), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.fixture
def _for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "target", lambda: Target(MULTIPROCESSORS))


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    "case",
    [
        *PRODUCTS.values(),
        pytest.param(Products("tensorwise", 128, 64, of_gradient=True), marks=needs_mixed),
    ],
    ids=str,
)
def test_lowering(case: Products) -> None:
    """One kernel, whose operands are not widened."""
    xs, ws, index = jax.eval_shape(case.operands)
    request = case.request

    def run(xs: Any, ws: Any, index: Any) -> Any:
        rows = [MOSAIC.operand(request, x) for x in xs]
        pairs = [*zip(rows, [MOSAIC.operand(request, w) for w in ws[0]], strict=True)]
        return MOSAIC.matmul(request, pairs, jnp.asarray(SIZES), index)

    text = jax.jit(run).trace(xs, ws, index).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "bf16" in text and "dot_general" not in text


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("case", "dtypes"),
    [
        (Products("rowwise", 128, 64), ("float8_e4m3fn", "float8_e4m3fn")),
        (Products("rowwise", 192, 64), ("bfloat16", "bfloat16")),
    ],
)
def test_what_is_multiplied(case: Products, dtypes: tuple[str, str]) -> None:
    """Scales follow the numbers of a row, so k-blocks have to end where these do."""
    assert MOSAIC.multiplied_dtypes(case.request) == dtypes
    gradient = replace(case.request, op="grouped_weight_gradient")
    assert MOSAIC.multiplied_dtypes(gradient) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("fp8", ["rowwise", "blockwise"])
@pytest.mark.parametrize("used_rows", [3, 3000])
def test_tilings_fit(fp8: str, used_rows: int) -> None:
    request = dataclasses.replace(Products(fp8, 256, 256).request, used_rows=used_rows)
    tilings = MOSAIC.configurations(request)
    assert len(set(tilings)) == len(tilings) >= 2
    assert all(tiling.shared_memory_bytes_of(1) <= SHARED_MEMORY_BYTES for tiling in tilings)
    assert tilings[0].tile_m == (64 if used_rows == 3 else 128)
