"""Weights whose largest magnitudes are known before an op quantizes them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    Quantized,
    all_gather_matmul,
    matmul_reduce_scatter,
    prequantize,
    prescale,
)
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS

#: x, two weights of a gather and one of a scatter, by the dimension that a second axis shards.
SPECS: dict[int | None, Any] = {
    None: (P(None, AXIS), P(None, AXIS), P(None, AXIS), P(AXIS)),
    0: (P("fsdp", AXIS), P("fsdp", AXIS), P("fsdp", AXIS), P((AXIS, "fsdp"))),
    1: (P("fsdp", AXIS), P(None, (AXIS, "fsdp")), P(None, (AXIS, "fsdp")), P(AXIS, "fsdp")),
}


def arrays() -> tuple[jax.Array, ...]:
    """Weights of one gather have scales in common in the backward: one is 8 times larger."""
    shapes = ((2, 16, 64), (64, 8, 4), (64, 32), (32, 64))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, *ws = [jax.random.normal(*each, jnp.bfloat16) for each in zip(keys, shapes, strict=True)]
    return x, ws[0], 8 * ws[1], ws[2]


def outcome(prepare: Any, fp8: Any, make_mesh: MeshFactory, dimension: int | None = None) -> Any:
    """Results and gradients with weights that `prepare` returns."""
    options: Any = {"fp8": fp8, "implementation": "ring"}
    if dimension is not None:
        options |= {"weight_axis_name": "fsdp", "weight_dimension": dimension}

    def results(x: jax.Array, up: Any, other: Any, down: Any) -> Any:
        up, other, down = prepare(up, other, down)
        a, b = all_gather_matmul(x, (up, other), AXIS, gather_dimension=1, **options)
        hidden = a.reshape(b.shape) * b
        return matmul_reduce_scatter(hidden, down, AXIS, scatter_dimension=1, **options)

    def both(*operands: jax.Array) -> Any:
        y, transpose = jax.vjp(results, *operands)
        return y, transpose(jnp.cos(y))

    specs = SPECS[dimension]
    mesh = make_mesh({AXIS: 2, "fsdp": 2})
    fun = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs))
    return jax.jit(fun)(*arrays())


def known_magnitudes(fp8: Any, *ws: jax.Array) -> tuple[Quantized, ...]:
    return tuple(prescale(w, fp8, magnitudes=prescale(w, fp8).magnitudes) for w in ws)


@pytest.mark.parametrize("dimension", [None, 0, 1])
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_results_and_gradients_are_those_of_arrays(
    fp8: Any, dimension: int | None, make_mesh: MeshFactory
) -> None:
    """Bit for bit, of weights and of shards."""
    expected = outcome(lambda *ws: ws, fp8, make_mesh, dimension)
    actual = outcome(functools.partial(known_magnitudes, fp8), fp8, make_mesh, dimension)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_prequantize_takes_them(fp8: Any, make_mesh: MeshFactory) -> None:
    def quantized(*ws: jax.Array) -> Any:
        up, other, down = known_magnitudes(fp8, *ws)
        return *prequantize((up, other), fp8), prequantize(down, fp8)

    expected = outcome(lambda *ws: ws, fp8, make_mesh)
    jax.tree.map(np.testing.assert_array_equal, outcome(quantized, fp8, make_mesh), expected)


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_no_pass_finds_what_is_known(fp8: Any) -> None:
    """The scales are those of the magnitudes that are given, and no weight is reduced."""
    w = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    known = prescale(w, fp8).magnitudes

    def scales(w: jax.Array, known: Any) -> Any:
        made = prequantize(prescale(w, fp8, magnitudes=known), fp8)
        return [made.forward.scales, made.backward.scales]

    twice = scales(w, jax.tree.map(lambda each: 2 * each, known))
    jax.tree.map(np.testing.assert_array_equal, twice, [2 * each for each in scales(w, known)])
    assert "reduce" not in str(jax.make_jaxpr(scales)(w, known))
    assert "reduce" in str(jax.make_jaxpr(lambda w: prescale(w, fp8).magnitudes)(w))


def test_magnitudes_by_recipe() -> None:
    """One of an array, or of columns and rows, also of weights [K, *N]; blocks have none."""
    w = jax.random.normal(jax.random.key(0), (64, 8, 4))
    matrix = np.abs(w).reshape(64, 32)
    assert prescale(w, "tensorwise").magnitudes == np.max(matrix)
    columns, rows = prescale(w, "rowwise").magnitudes
    np.testing.assert_array_equal(columns, np.max(matrix, 0, keepdims=True))
    np.testing.assert_array_equal(rows, np.max(matrix, 1, keepdims=True))
    assert prescale(w, "blockwise").magnitudes is None
    assert prescale(w[:, 0], "rowwise").T.magnitudes is None  # An op finds those of the transpose.


def test_what_does_not_fit_is_refused() -> None:
    w: Any = jnp.ones((4, 2))
    known = prescale(w, "rowwise").magnitudes
    with pytest.raises(ValueError, match=r"shapes \(\(1, 2\), \(4, 1\)\) for w \(2, 4\); expected"):
        prescale(w.T, "rowwise", magnitudes=known)
    with pytest.raises(
        ValueError, match=r"expected \(1, 1\), as 'tensorwise' has them; pass those"
    ):
        prescale(w, "tensorwise", magnitudes=known)
    with pytest.raises(ValueError, match="fp8='mxfp8': expected None"):
        prescale(w, "mxfp8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="w: float16, the first is float32"):
        prequantize((prescale(w, "rowwise"), w.astype("float16")), "rowwise")
    with pytest.raises(ValueError, match="w is quantized by 'tensorwise'; expected the same"):
        prequantize(prescale(w, "tensorwise"), "rowwise")


def test_an_op_refuses_another_format_and_a_mixture(make_mesh: MeshFactory) -> None:
    def of(prepare: Any) -> Any:
        return lambda: outcome(prepare, "rowwise", make_mesh)

    def mixed(up: Any, other: Any, down: Any) -> Any:
        return prequantize(up, "rowwise"), prescale(other, "rowwise"), down

    with pytest.raises(ValueError, match="fp8='rowwise': w is quantized by 'tensorwise'"):
        of(functools.partial(known_magnitudes, "tensorwise"))()
    with pytest.raises(ValueError, match="w: 1 of 2 weights are quantized, as numbers 0 of 1"):
        of(mixed)()
