"""What the ops compute with operands in 8 bits, in float64: the products of the quantized operands.

Operands are quantized as the library does, device by device; tests/test_fp8.py tests that itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import collective_matmul
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.packed_rows import PackedRows
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.scaled_matrix import ScaledMatrix
from tests.reference import AXIS, Case, Comparison, Outcome


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
        """Runs the case, and the reference with quantized operands."""
        arrays = self.arrays(seed)
        actual = self.run(mesh, arrays, run)
        bounds = self._bounds_of(quantized_outcome(self, arrays, magnitudes=True))
        return Comparison(actual, quantized_outcome(self, arrays), bounds, self.dtype)

    def _bounds_of(self, magnitudes: Outcome) -> Outcome:
        """As `Case.bounds`, whose terms are those of the quantized operands."""
        terms = max(self.contracted, int(np.prod(self.leading)), self._columns())
        float32, own = jnp.finfo(jnp.float32), jnp.finfo(self.dtype)
        # Two more roundings than there: the scales of both operands.
        relative = (terms + 2) * float(float32.eps) / 2
        relative += (self.devices + 2) * float(own.eps) / 2
        absolute = (self.devices + 2) * float(own.smallest_subnormal)
        return jax.tree.map(lambda magnitude: relative * magnitude + absolute, magnitudes)

    def _columns(self) -> int:
        return sum(int(np.prod(columns)) for columns in self.columns)


def quantized_outcome(case: Fp8Case, arrays: tuple, *, magnitudes: bool = False) -> Outcome:
    """Results and gradients of quantized operands; or of each the sum of terms' magnitudes."""
    x, ws, dys = arrays
    wide = (lambda a: abs(np.asarray(a, np.float64))) if magnitudes else _wide
    recipe, devices = cast(Recipe, FORMATS[case.fp8]), range(case.devices)
    ws, dys = [_matrix(w) for w in ws], [d.reshape(*x.shape[:-1], -1) for d in dys]
    if case.op == "all_gather_matmul":
        shards = np.split(x, case.devices, case.dimension)
        sent_x = [quantize_rows([shard], recipe)[0] for shard in shards]
        quantized = _join([dequantized(rows) for rows in sent_x], case)
        columns = [np.split(w, case.devices, 1) for w in ws]
        cotangents = [np.split(dy, case.devices, -1) for dy in dys]
        ys = [[], *([] for _ in ws[1:])]
        dws = [[], *([] for _ in ws[1:])]
        dx = 0.0
        for d in devices:
            own, dy = [w[d] for w in columns], [c[d] for c in cotangents]
            sent = quantize_rows(dy, recipe, True)
            back = quantize_weights([w.T for w in own], recipe)
            for i, w in enumerate(own):
                forward = dequantized(quantize_weights([w], recipe)[0])
                ys[i].append(wide(quantized) @ wide(forward))
                dx = dx + wide(dequantized(sent[i])) @ wide(dequantized(back[i]))
                pair = _join(sent_x, case), sent[i]
                dws[i].append(weight_gradient(x, dy[i], pair, recipe, wide))
        joined = [np.concatenate(y, -1) for y in ys]
        return _outcome(case, joined, dx, [np.concatenate(dw, 1) for dw in dws])
    parts, rows_of_w = np.split(x, case.devices, -1), np.split(ws[0], case.devices, 0)
    scattered = case.op == "matmul_reduce_scatter"
    cotangents = np.split(dys[0], case.devices, case.dimension) if scattered else [dys[0]]
    sent_dy = [quantize_rows([dy], recipe, True)[0] for dy in cotangents]
    gathered = _join([dequantized(rows) for rows in sent_dy], case)
    y, dx, dw = 0.0, [], []
    for part, w in zip(parts, rows_of_w, strict=True):
        forward = quantize_rows([part], recipe)[0], quantize_weights([w], recipe)[0]
        y = y + wide(dequantized(forward[0])) @ wide(dequantized(forward[1]))
        dx.append(wide(gathered) @ wide(dequantized(quantize_weights([w.T], recipe)[0])))
        pair = forward[0], _join(sent_dy, case)
        dw.append(weight_gradient(part, dys[0], pair, recipe, wide))
    return _outcome(case, [y], np.concatenate(dx, -1), [np.concatenate(dw, 0)])


def weight_gradient(
    x: np.ndarray, dy: np.ndarray, rows: tuple, recipe: Recipe, wide: Any
) -> np.ndarray:
    """``xᵀ dy``: of the arrays, or of their packed rows."""
    if not recipe.packs_gradients:
        return _contract_rows(wide(x), wide(dy))
    x, dy = _scaled_alike(*rows)
    return _contract_rows(wide(x), wide(dy))


def _scaled_alike(x: PackedRows, dy: PackedRows) -> tuple:
    """The values that rows stand for, those of dy rounded to a scale for all rows."""
    scales = [_wide(rows.scales) for rows in (x, dy)]
    assert all((np.frexp(each)[0] == 0.5).all() for each in scales)  # Powers of two.
    ratios = np.prod([each / each.max() for each in scales], 0)
    rounded = _wide((_wide(dy.values) * ratios).astype(dy.dtype))
    return _wide(x.values) * scales[0].max(), rounded * scales[1].max()


def _contract_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rows = tuple(range(x.ndim - 1))
    return np.tensordot(x, y, (rows, rows))


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _matrix(w: np.ndarray) -> np.ndarray:
    return w.reshape(w.shape[0], -1)


def _join(parts: Sequence[Any], case: Case) -> Any:
    join = lambda *arrays: jnp.concatenate(arrays, case.dimension)  # noqa: E731
    return parts[0] if len(parts) == 1 else jax.tree.map(join, *parts)


def _outcome(case: Case, ys: Sequence[Any], dx: Any, dws: Sequence[Any]) -> Outcome:
    """The outcome, with the dimensions of the columns as the case has them."""
    rows, contracted = case.leading, case.contracted
    return Outcome(
        tuple(y.reshape(*rows, *n) for y, n in zip(ys, case.columns, strict=True)),
        dx,
        tuple(dw.reshape(contracted, *n) for dw, n in zip(dws, case.columns, strict=True)),
    )
