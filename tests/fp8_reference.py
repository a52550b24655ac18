"""What the ops compute with operands in 8 bits, in float64: the products of the quantized operands.

Operands are quantized as the library does, device by device; tests/test_fp8.py tests that itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collective_matmul
from collective_matmul import fp8 as library
from collective_matmul.fp8 import RECIPES, Recipe
from collective_matmul.fp8_messages import message_scales, message_values
from tests.reference import AXIS, Case, Comparison, Outcome

# Compiled once for all shards of a shape; operation by operation they take most of a test's time.
quantize_rows: Callable = jax.jit(library.quantize_rows, static_argnums=(1, 2))
quantize_weights: Callable = jax.jit(library.quantize_weights, static_argnums=(1,))
dequantized: Callable = jax.jit(library.dequantized)
dequantized_rows: Callable = jax.jit(library.dequantized_rows, static_argnums=(1, 2, 3))


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
    recipe, devices = RECIPES[case.fp8], range(case.devices)
    ws, dys = [_matrix(w) for w in ws], [d.reshape(*x.shape[:-1], -1) for d in dys]
    if case.op == "all_gather_matmul":
        shards = np.split(x, case.devices, case.dimension)
        message = [quantize_rows([shard], recipe)[0] for shard in shards]
        quantized = _join(
            [dequantized_rows(m, x.shape[-1], recipe, recipe.dtype) for m in message], case
        )
        columns = [np.split(w, case.devices, 1) for w in ws]
        cotangents = [np.split(dy, case.devices, -1) for dy in dys]
        ys = [[], *([] for _ in ws[1:])]
        dws = [[], *([] for _ in ws[1:])]
        dx = 0.0
        for d in devices:
            own, dy = [w[d] for w in columns], [c[d] for c in cotangents]
            sent = quantize_rows(dy, recipe, recipe.gradient_dtype)
            back = quantize_weights([w.T for w in own], recipe)
            for i, w in enumerate(own):
                forward = dequantized(quantize_weights([w], recipe)[0])
                ys[i].append(wide(quantized) @ wide(forward))
                rows = dequantized_rows(sent[i], w.shape[1], recipe, recipe.gradient_dtype)
                dx = dx + wide(rows) @ wide(dequantized(back[i]))
                whole = _join(message, case)
                dtypes = recipe.dtype, recipe.gradient_dtype
                largest = max(abs(_wide(each)).max() for each in dy)  # They have a scale in common.
                dws[i].append(_weight_gradient(x, whole, dy[i], recipe, dtypes, wide, largest))
        joined = [np.concatenate(y, -1) for y in ys]
        return _outcome(case, joined, dx, [np.concatenate(dw, 1) for dw in dws])
    parts, rows_of_w = np.split(x, case.devices, -1), np.split(ws[0], case.devices, 0)
    scattered = case.op == "matmul_reduce_scatter"
    cotangents = np.split(dys[0], case.devices, case.dimension) if scattered else [dys[0]]
    message = [quantize_rows([dy], recipe, recipe.gradient_dtype)[0] for dy in cotangents]
    size = ws[0].shape[1]
    dtypes = recipe.gradient_dtype, recipe.dtype
    gathered = _join([dequantized_rows(m, size, recipe, dtypes[0]) for m in message], case)
    y, dx, dw = 0.0, [], []
    for part, w in zip(parts, rows_of_w, strict=True):
        forward = quantize_rows([part], recipe)[0], quantize_weights([w], recipe)[0]
        rows = dequantized_rows(forward[0], part.shape[-1], recipe, recipe.dtype)
        y = y + wide(rows) @ wide(dequantized(forward[1]))
        dx.append(wide(gathered) @ wide(dequantized(quantize_weights([w.T], recipe)[0])))
        whole = _join(message, case)
        dw.append(_weight_gradient(dys[0], whole, part, recipe, dtypes, wide).T)
    return _outcome(case, [y], np.concatenate(dx, -1), [np.concatenate(dw, 0)])


def _weight_gradient(
    plain: np.ndarray,
    message: jax.Array,
    other: np.ndarray,
    recipe: Recipe,
    dtypes: Any,
    wide: Any,
    largest: float | None = None,
) -> np.ndarray:
    """``messageᵀ other``: of the arrays, or of 8 bits with scales folded into `other`."""
    columns = plain.shape[-1]
    if not recipe.weight_gradient_in_fp8:
        return _contract_rows(wide(plain), wide(other))
    bound = None if largest is None else np.float32(largest)
    values, quantized, scale = _scaled_operands(message, other, columns, dtypes, bound)
    return _contract_rows(wide(values), wide(quantized)) * float(scale)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _scaled_operands(
    message: jax.Array, other: jax.Array, columns: int, dtypes: Any, largest: jax.Array | None
) -> tuple:
    """The message's values, `other` in 8 bits with its scales, and the scale of that.

    Both are returned in 8 bits: XLA drops a rounding whose result is widened in the same program.
    """
    scales = message_scales(message, columns, 1)
    scaled = jnp.asarray(other, jnp.float32) * scales
    bound = jnp.max(abs(scaled)) if largest is None else largest * jnp.max(scales)
    scale = jnp.maximum(bound * (1.0 / float(jnp.finfo(dtypes[1]).max)), 2.0**-126)
    mantissa, exponent = jnp.frexp(scale)
    scale = jnp.ldexp(jnp.where(mantissa > 0.5, 1.0, 0.5), exponent)  # A power of two.
    quantized = (scaled * (1.0 / scale)).astype(dtypes[1])
    return message_values(message, columns, dtypes[0]), quantized, scale


def _contract_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rows = tuple(range(x.ndim - 1))
    return np.tensordot(x, y, (rows, rows))


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _matrix(w: np.ndarray) -> np.ndarray:
    return w.reshape(w.shape[0], -1)


def _join(parts: Sequence[Any], case: Case) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, case.dimension)


def _outcome(case: Case, ys: Sequence[Any], dx: Any, dws: Sequence[Any]) -> Outcome:
    """The outcome, with the dimensions of the columns as the case has them."""
    rows, contracted = case.leading, case.contracted
    return Outcome(
        tuple(y.reshape(*rows, *n) for y, n in zip(ys, case.columns, strict=True)),
        dx,
        tuple(dw.reshape(contracted, *n) for dw, n in zip(dws, case.columns, strict=True)),
    )
