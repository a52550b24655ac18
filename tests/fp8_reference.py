"""Results of the ops with operands in 8 bits, in float64: products of the quantized operands.

Operands are quantized as the library does, device by device; tests/operands/test_fp8.py tests that
itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import collective_matmul
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from tests.reference import AXIS, Case, Comparison, Outcome

#: The recipes that the library ships and this reference knows. A recipe that is registered besides
#: has tests of its own.
SHIPPED_RECIPES = {
    name: FORMATS[name] for name in ("tensorwise", "rowwise", "blockwise") if name in FORMATS
}


# Compiled once for all shards of a shape; operation by operation they take most of a test's time.
@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize_rows(xs: Any, recipe: Recipe, of_gradient: bool = False) -> Sequence[PackedRows]:
    """The packed rows of arrays, without the arrays."""
    return [rows.without_array for rows in recipe.rows(xs, of_gradient=of_gradient)]


@functools.partial(jax.jit, static_argnums=1)
def quantize_weights(ws: Any, recipe: Recipe) -> Sequence[ScaledMatrix]:
    """The matrices of weights."""
    return recipe.matrices(ws)


@jax.jit
def dequantized(quantized: Any) -> jax.Array:
    """The array that rows or a matrix stand for."""
    return quantized.dequantized()


@dataclass(frozen=True)
class Fp8Case(Case):
    """A call of an op with `fp8`."""

    fp8: str = "rowwise"

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.fp8}"

    def call(self, x: jax.Array, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The op on local arrays, under `shard_map`."""
        keywords: dict[str, Any] = {"implementation": self.implementation, "fp8": self.fp8}
        if self.op == "all_gather_matmul":
            keywords["gather_dimension"] = self.dimension
            return collective_matmul.all_gather_matmul(x, tuple(ws), AXIS, **keywords)
        if self.op == "matmul_reduce_scatter":
            keywords["scatter_dimension"] = self.dimension
        return (getattr(collective_matmul, self.op)(x, ws[0], AXIS, **keywords),)

    def compare(self, mesh: Any, seed: int = 0, run: Any = jax.jit) -> Comparison:
        """Runs the case, and by `run` too what quantizes the operands of the reference."""
        arrays = self.arrays(seed)
        actual = self.run(mesh, arrays, run)
        expected, magnitudes = quantized_outcomes(self, arrays, run)
        return Comparison(actual, expected, self._bounds_of(magnitudes), self.dtype)

    def _bounds_of(self, magnitudes: Outcome) -> Outcome:
        """Bounds like those of `Case.bounds`, for terms of the quantized operands."""
        terms = max(self.contracted, int(np.prod(self.leading)), self._columns())
        float32, own = jnp.finfo(jnp.float32), jnp.finfo(self.dtype)
        # Two more roundings than there: the scales of both operands.
        relative = (terms + 2) * float(float32.eps) / 2
        relative += (self.devices + 2) * float(own.eps) / 2
        absolute = (self.devices + 2) * float(own.smallest_subnormal)
        return jax.tree.map(lambda magnitude: relative * magnitude + absolute, magnitudes)

    def _columns(self) -> int:
        return sum(int(np.prod(columns)) for columns in self.columns)


class Rows(NamedTuple):
    """Quantized rows: the numbers that they stand for, which are products of values and scales."""

    exact: Any
    values: Any
    scales: Any


class Shards(NamedTuple):
    """Arrays that one device quantizes: rows of x and of each dy, each weight and its transpose."""

    x: Rows
    dys: list[Rows]
    ws: list[Any]
    transposed: list[Any]


@functools.partial(jax.jit, static_argnums=0)
def quantize_shards(recipe: Recipe, x: Any, ws: Sequence[Any], dys: Sequence[Any]) -> Shards:
    """The operands of one device, quantized as the ops do."""

    def rows(packed: PackedRows) -> Rows:
        return Rows(packed.dequantized(), packed.values, packed.scales)

    return Shards(
        rows(recipe.rows([x])[0]),
        [rows(packed) for packed in recipe.rows(dys, of_gradient=True)],
        [recipe.matrices([w])[0].dequantized() for w in ws],
        [matrix.dequantized() for matrix in recipe.matrices([w.T for w in ws])],
    )


def quantized_outcomes(case: Fp8Case, arrays: tuple, run: Any = jax.jit) -> tuple[Outcome, Outcome]:
    """Results and gradients of quantized operands, and of each the sum of its terms' magnitudes.

    `run` compiles or simulates what quantizes, as it does with the op: both round alike.
    """
    x, ws, dys = arrays
    recipe, count = cast(Recipe, FORMATS[case.fp8]), case.devices
    gathers = case.op == "all_gather_matmul"
    ws, dys = [_matrix(w) for w in ws], [d.reshape(*x.shape[:-1], -1) for d in dys]
    xs = np.split(x, count, case.dimension if gathers else -1)
    weights = _per_device(ws, count, 1 if gathers else 0)
    if case.op == "matmul_all_reduce":
        cotangents = [dys] * count
    else:
        cotangents = _per_device(dys, count, -1 if gathers else case.dimension)
    quantize = run(functools.partial(quantize_shards, recipe))
    shards = [
        jax.tree.map(np.asarray, quantize(*operands))
        for operands in zip(xs, weights, cotangents, strict=True)
    ]
    outcome = _gathered if gathers else _summed
    values, magnitudes = (
        outcome(case, (x, dys), shards, wide) for wide in (_wide, lambda a: abs(_wide(a)))
    )
    return values, magnitudes


def _per_device(
    arrays: Sequence[np.ndarray], devices: int, dimension: int
) -> list[list[np.ndarray]]:
    return [*map(list, zip(*(np.split(a, devices, dimension) for a in arrays), strict=True))]


def _gathered(case: Fp8Case, arrays: tuple, shards: Sequence[Shards], wide: Any) -> Outcome:
    """The outcome of a gather, to whose x each device applies columns of its own."""
    x, dys = arrays
    recipe = cast(Recipe, FORMATS[case.fp8])
    sent_x = _join([own.x for own in shards], case)
    ys, dws, dx = [[] for _ in dys], [[] for _ in dys], 0.0
    for i, dy in enumerate(dys):
        for own, local in zip(shards, np.split(dy, case.devices, -1), strict=True):
            ys[i].append(wide(sent_x.exact) @ wide(own.ws[i]))
            dx = dx + wide(own.dys[i].exact) @ wide(own.transposed[i])
            dws[i].append(weight_gradient(x, local, (sent_x, own.dys[i]), recipe, wide))
    joined = [np.concatenate(y, -1) for y in ys]
    return _outcome(case, joined, dx, [np.concatenate(dw, 1) for dw in dws])


def _summed(case: Fp8Case, arrays: tuple, shards: Sequence[Shards], wide: Any) -> Outcome:
    """The outcome of a sum over devices, each of which has rows of the weight of its own."""
    x, (dy,) = arrays
    recipe = cast(Recipe, FORMATS[case.fp8])
    scattered = case.op == "matmul_reduce_scatter"
    sent_dy = _join([own.dys[0] for own in (shards if scattered else shards[:1])], case)
    y, dx, dw = 0.0, [], []
    for own, local in zip(shards, np.split(x, case.devices, -1), strict=True):
        y = y + wide(own.x.exact) @ wide(own.ws[0])
        dx.append(wide(sent_dy.exact) @ wide(own.transposed[0]))
        dw.append(weight_gradient(local, dy, (own.x, sent_dy), recipe, wide))
    return _outcome(case, [y], np.concatenate(dx, -1), [np.concatenate(dw, 0)])


def weight_gradient(
    x: np.ndarray, dy: np.ndarray, rows: tuple, recipe: Recipe, wide: Any
) -> np.ndarray:
    """``xᵀ dy``: of the arrays, or of their packed rows."""
    if not recipe.packs_gradients:
        return _contract_rows(wide(x), wide(dy))
    x, dy = _scaled_alike(*rows)
    return _contract_rows(wide(x), wide(dy))


def _scaled_alike(x: Rows | PackedRows, dy: Rows | PackedRows) -> tuple:
    """The values that rows stand for, those of dy rounded to a scale for all rows."""
    scales = [_wide(rows.scales) for rows in (x, dy)]
    assert all((np.frexp(each)[0] == 0.5).all() for each in scales)  # Powers of two.
    ratios = np.prod([each / each.max() for each in scales], 0)
    rounded = _wide((_wide(dy.values) * ratios).astype(dy.values.dtype))
    return _wide(x.values) * scales[0].max(), rounded * scales[1].max()


def _contract_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rows = tuple(range(x.ndim - 1))
    return np.tensordot(x, y, (rows, rows))


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _matrix(w: np.ndarray) -> np.ndarray:
    return w.reshape(w.shape[0], -1)


def _join(parts: Sequence[Rows], case: Case) -> Rows:
    return Rows(*(np.concatenate(arrays, case.dimension) for arrays in zip(*parts, strict=True)))


def _outcome(case: Case, ys: Sequence[Any], dx: Any, dws: Sequence[Any]) -> Outcome:
    """The outcome, with the dimensions of the columns as the case has them."""
    rows, contracted = case.leading, case.contracted
    return Outcome(
        tuple(y.reshape(*rows, *n) for y, n in zip(ys, case.columns, strict=True)),
        dx,
        tuple(dw.reshape(contracted, *n) for dw, n in zip(dws, case.columns, strict=True)),
    )
