"""Operands that the kernel that computes them converts, beside those converted by themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.operands.format import FORMATS, Format
from collective_matmul.operands.grouped import Conversion, separate_rows
from collective_matmul.operands.recipes import recipe
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.recipes.rowwise import ROWWISE
from collective_matmul.operands.scaled.scaled_rows import ScaledRows
from collective_matmul.ops.experts.grouped import triton_kernels
from collective_matmul.ops.experts.grouped.triton_kernels import map_rows
from collective_matmul.ops.experts.grouped.xla import XlaGrouped
from tests.hopper import skip_without_hopper
from tests.kernel_bounds import rounds_as_triton, within_bounds
from tests.ops.experts.grouped.test_kernels import lowered, lowers_triton, shaped

RECIPES = ["tensorwise", "rowwise", "blockwise"]
ROWS, USED = 12, 9
#: No power of two: the kernel fills rows up. The last has columns of two blocks and a half.
WIDTHS = [96, 384, 320]


class _WithoutKernel(Recipe):
    """A format that says nothing of rows in registers."""

    local_rows: Any = Format.local_rows


def gradients(a: jax.Array, b: jax.Array, value: jax.Array) -> tuple:
    """The first result and what is summed are largest for zeros, as behind the columns."""
    is_zero = (a == 0) & (b == 0)
    product, sum_ = (jnp.where(is_zero, 1e30, each) for each in (a * b, a + b))
    return (product, a * value, b), sum_


def drawn(width: int) -> list[np.ndarray]:
    """Rows of very different sizes, one of zeros, and two with what is not finite."""
    generator = np.random.default_rng(7)
    spread = np.exp(4 * generator.standard_normal((ROWS, 1)))
    made = [generator.standard_normal((ROWS, width)) * spread for _ in range(2)]
    made[0][1] = 0
    made[0][2, 5], made[0][4, 7] = np.inf, np.nan
    for rows in made:
        rows[USED:] = np.nan
    return [rows.astype(jnp.bfloat16) for rows in made]


def mapped(conversion: Conversion | None, width: int, **options: Any) -> Sequence[Any]:
    a, b = drawn(width)
    value = np.linspace(-1, 1, ROWS, dtype=np.float32)
    arguments: Any = [a, b], [value], np.int32(USED)
    run = functools.partial(
        map_rows, gradients, results=3, row_sums=True, conversion=conversion, interpret=True
    )
    with within_bounds(triton_kernels):
        return jax.jit(run)(*arguments)


def assert_same(found: Any, expected: Any) -> None:
    """The used rows are equal."""
    one, other = (np.asarray(each[:USED], np.float32) for each in (found, expected))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("keeps_arrays", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fp8", RECIPES)
def test_operands_are_those_of_the_arrays(fp8: str, width: int, keeps_arrays: bool) -> None:
    stored = FORMATS[fp8]
    conversion = Conversion(stored, 2, of_gradient=True, keeps_arrays=keeps_arrays)
    *kept, sums, one, other = mapped(conversion, width)
    *arrays, expected_sums = mapped(None, width)
    for found, expected in zip(kept, arrays if keeps_arrays else arrays[2:], strict=True):
        assert_same(found, expected)
    # They are added in another order.
    np.testing.assert_allclose(sums[:USED], expected_sums[:USED], rtol=1e-4)
    rows = jax.jit(lambda xs: separate_rows(stored, xs, of_gradient=True))(arrays[:2])
    in_kernel = fp8 != "blockwise" or width % 128 == 0
    for found, expected in zip((one, other), rows, strict=True):
        assert isinstance(found, ScaledRows) == in_kernel
        assert found.dtype == expected.dtype
        assert_same(found.scales, expected.scales)
        numbers = np.asarray(expected.values, np.float32)
        # Infinity stays what it is in float8_e5m2 alone, and only outside of the kernel.
        numbers = np.where(np.isinf(numbers), np.nan, numbers) if in_kernel else numbers
        assert_same(found.values, numbers)
        assert_same(
            np.nan_to_num(found.dequantized(), posinf=0, neginf=0),
            np.nan_to_num(expected.dequantized(), posinf=0, neginf=0),
        )


def test_what_is_not_finite_is_nan_where_conversions_stop_at_the_largest_number() -> None:
    conversion = Conversion(ROWWISE, 2)
    *_, expected, _ = mapped(conversion, 96)
    with rounds_as_triton(recipe):
        *_, found, _ = mapped(conversion, 96)
    assert np.isnan(np.asarray(found.values[:USED], np.float32)).any()
    assert_same(found.values, expected.values)


def test_a_format_without_rows_in_registers_is_converted_afterwards() -> None:
    *_, one = mapped(Conversion(_WithoutKernel("without"), 1), 96)
    *_, expected = mapped(Conversion(ROWWISE, 1), 96)
    assert not isinstance(one, ScaledRows)
    assert_same(one.values, expected.values)


@pytest.mark.parametrize(("width", "is_fused"), [(16384, True), (16512, False)])
def test_rows_longer_than_registers_are_converted_afterwards(width: int, is_fused: bool) -> None:
    *_, one, _ = jax.eval_shape(lambda: mapped(Conversion(ROWWISE, 2), width))
    assert isinstance(one, ScaledRows) == is_fused


def test_the_default_converts_too() -> None:
    arguments: Any = drawn(96), [np.linspace(-1, 1, ROWS, dtype=np.float32)], USED
    conversion = Conversion(ROWWISE, 2, of_gradient=True)
    third, sums, *found = XlaGrouped().map_rows(
        gradients, *arguments, results=3, row_sums=True, conversion=conversion
    )
    expected_third, expected_sums, *expected = mapped(conversion, 96)
    assert_same(third, expected_third)
    np.testing.assert_allclose(sums[:USED], expected_sums[:USED], rtol=1e-6)
    for rows, others in zip(found, expected, strict=True):
        assert_same(rows.values, others.values)


def two_kernels(conversion: Conversion) -> Any:
    def fun(a: jax.Array, b: jax.Array, value: jax.Array, count: jax.Array) -> Any:
        made = map_rows(
            gradients,
            [a, b],
            [value],
            count,
            results=3,
            row_sums=True,
            conversion=conversion,
        )
        return jax.tree.leaves(made)

    return fun


@lowers_triton
@pytest.mark.parametrize("fp8", RECIPES)
def test_conversions_lower_for_cuda(fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, in the kernel. Other GPUs may lack numbers of 8 bits."""
    arguments = [*shaped((256, 768), (256, 768)), *shaped((256,), (), dtype=jnp.float32)]
    arguments[-1] = jax.ShapeDtypeStruct((), jnp.int32)
    conversion = Conversion(FORMATS[fp8], 2, of_gradient=True, keeps_arrays=True)
    for target, types in ((Target(132), 2), (None, 0)):
        monkeypatch.setattr(device, "target", lambda target=target: target)
        (line,) = (
            line
            for line in lowered(two_kernels(conversion), *arguments).splitlines()
            if "__gpu$xla.gpu.triton" in line
        )
        assert line.count("tensor<256x768xf8E") == types


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 14336])
@pytest.mark.parametrize("fp8", RECIPES)
def test_on_a_gpu(fp8: str, width: int) -> None:
    """Its division may differ from XLA's in the last place of a scale's inverse."""
    skip_without_hopper()
    a, b = (jnp.asarray(x) for x in drawn(width))
    value = jnp.linspace(-1, 1, ROWS, dtype=jnp.float32)
    stored = FORMATS[fp8]
    conversion = Conversion(stored, 2, of_gradient=True, keeps_arrays=True)
    run = functools.partial(map_rows, gradients, results=3, row_sums=True, conversion=conversion)
    *arrays, _, one, other = jax.jit(run)([a, b], [value], jnp.int32(USED))
    rows = jax.jit(lambda xs: separate_rows(stored, xs, of_gradient=True))(arrays[:2])
    for found, expected in zip((one, other), rows, strict=True):
        assert isinstance(found, ScaledRows)
        assert_same(found.scales, expected.scales)
        values, numbers = (np.asarray(x.values[:USED], np.float32) for x in (found, expected))
        numbers = np.where(np.isinf(numbers), np.nan, numbers)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(numbers))
        differ = np.nan_to_num(values) != np.nan_to_num(numbers)
        assert differ.mean() < 1e-3
        np.testing.assert_allclose(values, numbers, rtol=0.26, atol=2.0**-8)
