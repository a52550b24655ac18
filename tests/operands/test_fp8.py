"""Quantization: what a recipe promises of each number, and packed rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.scaled.packed_rows import pack
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from collective_matmul.operands.scaled.scaling import BLOCK
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
ROWS, CONTRACTED, COLUMNS = 12, 200, 136


def drawn(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def product_of(recipe: Recipe, x: np.ndarray, w: np.ndarray) -> jax.Array:
    """x @ w by XLA, of operands in a recipe."""
    (rows,), (matrix,) = recipe.rows([x]), recipe.matrices([w])
    assert isinstance(matrix, ScaledMatrix)
    return matrix.multiply_in_xla(rows)


def largest_of_part(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    """For each number of [rows, K], the largest magnitude of those it shares a scale with.

    Twice that where the scale is rounded up to a power of two.
    """
    if recipe.name == "tensorwise":
        return np.full_like(x, 2 * abs(x).max())
    if recipe.name == "rowwise":
        return np.broadcast_to(abs(x).max(-1, keepdims=True), x.shape)
    blocks = range(0, x.shape[-1], BLOCK)
    parts = [x[..., start : start + BLOCK] for start in blocks]
    return np.concatenate(
        [np.broadcast_to(abs(part).max(-1, keepdims=True), part.shape) for part in parts], -1
    )


def rounding_bound(x: np.ndarray, largest: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """How far each quantized number may be off.

    The largest is stored as the dtype's largest. Rounding to the nearest is off by half of the
    distance between neighbours: relative to a normal number by half of the dtype's eps, else by
    half of its smallest number. Scaling rounds three times in float32, which is less than 2⁻²¹.
    """
    info = jnp.finfo(dtype)
    normal = abs(x) * (float(info.eps) / 2 + 2.0**-21)
    subnormal = largest / float(info.max) * float(info.smallest_subnormal) / 2
    return np.maximum(normal, subnormal) * (1 + 2.0**-20)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_rows_are_within_the_bound_of_their_recipe(
    recipe: Recipe, source: Any, dtype: jnp.dtype
) -> None:
    # Rows and columns of very different sizes.
    x = drawn(ROWS, CONTRACTED) * 10.0 ** np.linspace(-3, 3, ROWS)[:, None]
    x = (x * np.exp(drawn(1, CONTRACTED, seed=1))).astype(source)
    (quantized,) = dataclasses.replace(recipe, dtype=dtype).rows([x])
    assert quantized.shape == x.shape
    assert quantized.packed.shape == (ROWS, recipe.row_bytes(CONTRACTED, 4))
    actual = np.asarray(quantized.dequantized(), np.float64)
    wide = x.astype(np.float64)
    bound = rounding_bound(wide, largest_of_part(wide, recipe), dtype)
    assert (abs(actual - wide) <= bound).all()


@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_weights_are_within_the_bound_of_their_recipe(recipe: Recipe) -> None:
    w = drawn(CONTRACTED, COLUMNS) * 10.0 ** np.linspace(-3, 3, COLUMNS)
    w = w.astype(np.float32)
    (quantized,) = recipe.matrices([w])
    assert quantized.shape == w.shape
    largest = largest_of_part(w.T, recipe).T
    if recipe.name == "blockwise":
        largest = np.block(
            [
                [np.full_like(part, abs(part).max()) for part in np.split(rows, [BLOCK], 1)]
                for rows in np.split(w, [BLOCK], 0)
            ]
        )
    actual = np.asarray(quantized.dequantized(), np.float64)
    assert (abs(actual - w) <= rounding_bound(w, largest, E4M3)).all()


def test_rows_keep_their_precision_beside_larger_ones() -> None:
    """A row 10⁴ times smaller than another: with a scale of its own it loses nothing."""
    x = drawn(2, CONTRACTED)
    x[1] *= 1e-4
    bound = rounding_bound(x, 2 * largest_of_part(x, cast(Recipe, FORMATS["rowwise"])), E4M3)
    within = {}
    for name, recipe in SHIPPED_RECIPES.items():
        quantized = cast(Recipe, recipe).rows([x])[0].dequantized()
        within[name] = (abs(quantized - x) <= bound).mean(axis=1)
    for name in within.keys() - {"tensorwise"}:
        np.testing.assert_array_equal(within[name], 1.0)
    # In common with the larger row, many numbers are below the normal ones.
    assert within["tensorwise"][0] == 1.0
    assert within["tensorwise"][1] < 0.8


@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_zeros_and_the_smallest_numbers(recipe: Recipe) -> None:
    """A row of zeros, and one whose scale would be below the normal numbers."""
    x = np.zeros((3, CONTRACTED), np.float32)
    x[1] = 1e-37
    for rows in (x, x[:1]):
        product = product_of(recipe, rows, np.zeros((CONTRACTED, 8), np.float32))
        np.testing.assert_array_equal(product, 0.0)
        values = recipe.rows([rows])[0].dequantized()
        np.testing.assert_allclose(values, rows, rtol=2**-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_what_is_not_finite_shows_in_its_own_row_alone(recipe: Recipe, value: float) -> None:
    x, w = drawn(4, CONTRACTED), drawn(CONTRACTED, COLUMNS, seed=1)
    clean = product_of(recipe, x, w)
    largest = x[2].argmax()
    x[2, largest - 1] = value
    dirty = product_of(recipe, x, w)
    assert not np.isfinite(dirty[2]).any()
    np.testing.assert_array_equal(np.delete(dirty, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_a_column_that_is_not_finite(recipe: Recipe) -> None:
    x, w = drawn(4, CONTRACTED), drawn(CONTRACTED, COLUMNS, seed=1)
    w[3, 5] = np.inf
    product = product_of(recipe, x, w)
    assert not np.isfinite(product[:, 5]).any()
    assert np.isfinite(np.delete(product, 5, 1)).all()


def test_packed_rows_keep_every_byte(make_mesh: MeshFactory) -> None:
    """Through concatenation, a permute, a gather and an update in place, compiled."""
    mesh = make_mesh({AXIS: 2})
    bits = np.random.default_rng(0).integers(0, 2**32, (512, 3), np.uint32)
    values = np.tile(np.arange(256, dtype=np.uint8), (512, 1)).view(E4M3)

    def travel(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent = pack(values, jax.lax.bitcast_convert_type(scales, jnp.float32), block=86)
        packed = jax.lax.ppermute(sent.packed, AXIS, [(0, 1), (1, 0)])
        whole = jax.lax.all_gather(packed, AXIS, tiled=True)
        whole = jax.lax.dynamic_update_slice(jnp.zeros_like(whole), whole[:256], (256, 0))
        rows = dataclasses.replace(sent, packed=whole)
        return rows.values[256:], jax.lax.bitcast_convert_type(rows.scales[256:], jnp.uint32)

    run = jax.jit(jax.shard_map(travel, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    values_after, bits_after = run(values, bits)
    np.testing.assert_array_equal(bits_after[:256], bits[256:])
    np.testing.assert_array_equal(np.asarray(values_after).view(np.uint8), values.view(np.uint8))


def test_an_unknown_recipe_is_refused(make_mesh: MeshFactory) -> None:
    recipe: Any = "mxfp8"
    op = functools.partial(all_gather_matmul, axis_name=AXIS, fp8=recipe)
    fun = jax.shard_map(op, mesh=make_mesh({AXIS: 2}), in_specs=P(), out_specs=P(None, AXIS))
    with pytest.raises(ValueError, match=r"fp8='mxfp8': expected None .*'rowwise'"):
        jax.eval_shape(fun, jnp.ones((2, 8)), jnp.ones((8, 4)))


@pytest.mark.parametrize("sizes", [(1, 8), (16, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_one_contracted_number_and_one_column(recipe: Recipe, sizes: tuple[int, int]) -> None:
    """A reduction of one number is the number itself, which may be negative or infinite."""
    x, w = drawn(ROWS, sizes[0]), drawn(*sizes, seed=1)
    w[-1, -1] = -abs(w[-1, -1])
    product = product_of(recipe, x, w)
    # Both operands round by 2⁻⁴ at most.
    assert (abs(product - x @ w) <= 2.0**-2.9 * (abs(x) @ abs(w))).all()
    for value in (np.inf, -np.inf, np.nan):
        w[-1, -1] = value
        dirty = product_of(recipe, x, w)
        assert np.isnan(dirty[:, -1]).all()
        np.testing.assert_array_equal(dirty[:, :-1], product[:, :-1])


@pytest.mark.parametrize("contracted", [1, 2, CONTRACTED])
@pytest.mark.parametrize("sizes", [(1e35, 1e-3), (1e-3, 1e35), (1e36, 1e-36), (1e-34, 1e34)])
@pytest.mark.parametrize("recipe", SHIPPED_RECIPES.values(), ids=list(SHIPPED_RECIPES))
def test_large_rows_times_small_columns(
    recipe: Recipe, sizes: tuple[float, float], contracted: int
) -> None:
    """Scales do not overflow where their product with the sum does not."""
    x, w = drawn(ROWS, contracted) * sizes[0], drawn(contracted, 8, seed=1) * sizes[1]
    x, w = x.astype(np.float32), w.astype(np.float32)
    product = product_of(recipe, x, w)
    magnitudes = abs(x).astype(np.float64) @ abs(w).astype(np.float64)
    exact = x.astype(np.float64) @ w
    assert (abs(np.asarray(product) - exact) <= 2.0**-2.9 * magnitudes).all()


@pytest.mark.parametrize("block", [None, 16, BLOCK])
def test_shapes_of_packed_rows_derive_from_their_bytes(block: int | None) -> None:
    for columns in (*range(1, 300), 4096, 5000, 28672):
        scales = 1 if block is None else -(-columns // block)
        rows = jax.eval_shape(
            lambda *arrays: pack(*arrays, block=block),
            jax.ShapeDtypeStruct((2, 3, columns), E4M3),
            jax.ShapeDtypeStruct((2, 3, scales), jnp.float32),
        )
        assert rows.shape == (2, 3, columns)
