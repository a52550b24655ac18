"""Ops whose operands have a scale for each row of x and each column of w, against float64 NumPy.

What a row stands for then depends on this row alone. So one reference, of global arrays, serves
every sharding of rows and weights. Only the axis of the op divides what scales are taken over: the
columns of a gathered op's dy and w, and the contraction of a summed one's x and w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul import prequantize
from tests.reference import AXIS, Case, Comparison, Outcome, assert_close

FSDP = "fsdp"
#: Rounds an array to a format, with a scale for all numbers along an axis: float64. The last
#: argument says whether they are gradients.
Quantize = Callable[[np.ndarray, int, bool], np.ndarray]


@dataclass(frozen=True)
class RowScaledCase(Case):
    """A call of an op with operands in a format.

    Attributes:
      fp8: the format.
      weight_dimension: the dimension of weights that a second axis shards, which also shards
        the first dimension of x; None: weights are whole.
      einsum: whether a gather is called as an einsum of a batch of sequences.
      quantized_before: whether weights are quantized by `prequantize`.
    """

    fp8: str = "rowwise"
    weight_dimension: int | None = None
    einsum: bool = False
    quantized_before: bool = False

    @property
    def specs(self) -> tuple[P, tuple[P, ...], tuple[P, ...]]:
        x, ws, ys = super().specs
        if self.weight_dimension is None:
            return x, ws, ys
        w = list(self._filled(ws[0], 2))
        axes = (w[self.weight_dimension], FSDP)
        w[self.weight_dimension] = tuple(axis for axis in axes if axis is not None)
        return self._in_groups(x), (P(*w),) * len(ws), tuple(map(self._in_groups, ys))

    def _in_groups(self, spec: P) -> P:
        first, *others = self._filled(spec, len(self.leading))
        return P((FSDP,) if first is None else (FSDP, first), *others)

    @staticmethod
    def _filled(spec: P, size: int) -> tuple:
        return (*spec, *(None,) * (size - len(spec)))

    def call(self, x: jax.Array, ws: Any) -> tuple[jax.Array, ...]:
        sharding = {}
        if self.weight_dimension is not None:
            sharding = {"weight_axis_name": FSDP, "weight_dimension": self.weight_dimension}
        if self.quantized_before:
            ws = prequantize(tuple(ws), self.fp8, **sharding)
        keywords: dict[str, Any] = {"implementation": self.implementation, "fp8": self.fp8}
        if self.einsum:
            keywords["gather"] = "bs"[self.dimension]
            einsum = collective_matmul.collective_einsum
            return (einsum("bsd,dhk->bshk", x, ws[0], AXIS, **keywords),)
        keywords |= sharding
        if self.op == "all_gather_matmul":
            keywords["gather_dimension"] = self.dimension
            return collective_matmul.all_gather_matmul(x, tuple(ws), AXIS, **keywords)
        if self.op == "matmul_reduce_scatter":
            keywords["scatter_dimension"] = self.dimension
        return (getattr(collective_matmul, self.op)(x, ws[0], AXIS, **keywords),)

    def expected(self, arrays: tuple, quantize: Quantize) -> Outcome:
        """The results and gradients of quantized operands; weight gradients are of arrays."""
        x, ws, dys = arrays
        ws, dys = [w.reshape(w.shape[0], -1) for w in ws], [self._as_rows(dy) for dy in dys]
        gathers = self.op == "all_gather_matmul"
        ys: list[Any] = [[] for _ in ws]
        dxs: list[Any] = []
        for d in range(self.devices):
            own = partial(self._own, d)
            row = own(x, -1) if not gathers else x
            parts = [own(w, 1 if gathers else 0) for w in ws]
            for y, w in zip(ys, parts, strict=True):
                y.append(quantize(row, -1, False) @ quantize(w, 0, False))
            sent = [own(dy, -1) if gathers else dy for dy in dys]
            pairs = zip(sent, parts, strict=True)
            dxs.append(sum(quantize(dy, -1, True) @ quantize(w.T, 0, False) for dy, w in pairs))
        joined = [np.concatenate(y, -1) if gathers else np.sum(y, 0) for y in ys]
        rows = tuple(range(x.ndim - 1))
        wide = x.astype(np.float64)
        return Outcome(
            tuple(y.reshape(*self.leading, *n) for y, n in zip(joined, self.columns, strict=True)),
            sum(dxs) if gathers else np.concatenate(dxs, -1),
            tuple(
                np.tensordot(wide, dy.astype(np.float64), (rows, rows)).reshape(-1, *n)
                for dy, n in zip(dys, self.columns, strict=True)
            ),
        )

    def _as_rows(self, dy: np.ndarray) -> np.ndarray:
        return dy.reshape(*self.leading, -1)

    def _own(self, device: int, array: np.ndarray, axis: int) -> np.ndarray:
        return np.split(array, self.devices, axis)[device]

    def comparison(
        self, arrays: tuple, actual: Outcome, quantize: Quantize, *, exact_products: bool
    ) -> Comparison:
        """The outcome beside the reference, with a bound of the rounded sums.

        A product is scaled twice, and rounded to the dtype of the case. Up to D of them, and up to
        two weights' shares, are added. Sums of integers below 2²⁴ are exact before.
        """
        x, ws, dys = arrays
        magnitudes = self.expected(
            (abs(x), [abs(w) for w in ws], [abs(dy) for dy in dys]),
            lambda *args: abs(quantize(*args)),
        )
        roundings = 2 + self.devices + 2
        contracted = max(self.contracted, sum(w[0].size for w in ws))
        rows = x.size // self.contracted
        float32, own = (float(jnp.finfo(t).eps) / 2 for t in (jnp.float32, self.dtype))

        def bound(terms: int) -> Callable:
            return lambda m: (terms * float32 + roundings * own) * m + 1e-30

        of_products = bound(0 if exact_products else contracted)
        bounds = Outcome(
            tuple(map(of_products, magnitudes.ys)),
            of_products(magnitudes.dx),
            tuple(map(bound(rows), magnitudes.dws)),
        )
        return Comparison(actual, self.expected(arrays, quantize), bounds, self.dtype)


def cases_of(implementation: str, devices: int, fp8: str, **options: Any) -> list[RowScaledCase]:
    """Every op, along both dimensions. Two axes may shard these sizes."""
    options["fp8"] = fp8

    def case(op: str, columns: tuple, dimension: int = 0, **more: Any) -> RowScaledCase:
        sizes = (8, 4), 16, columns, dimension
        return RowScaledCase(op, implementation, devices, *sizes, **options, **more)

    cases = [case("matmul_all_reduce", ((12,),))]
    for dimension in (0, 1):
        cases += [
            case("all_gather_matmul", ((8,),), dimension),
            case("all_gather_matmul", ((8,), (16,)), dimension),
            case("matmul_reduce_scatter", ((12,),), dimension),
        ]
    if "weight_dimension" not in options:
        cases.append(case("all_gather_matmul", ((4, 3),), 1, einsum=True))
    return cases


def run_all(cases: Sequence[RowScaledCase], mesh: Any) -> list[tuple[tuple, Outcome]]:
    """Arrays and outcomes of cases, out of one compiled program."""
    arrays = [case.arrays(seed) for seed, case in enumerate(cases)]

    @jax.jit
    def program(arrays: Any) -> list[Outcome]:
        pairs = zip(cases, arrays, strict=True)
        return [case.run(mesh, each, jit=lambda fun: fun) for case, each in pairs]

    return list(zip(arrays, program(arrays), strict=True))


def check(
    cases: Sequence[RowScaledCase], mesh: Any, quantize: Quantize, *, exact_products: bool = False
) -> None:
    """Results and gradients of cases are those of the quantized operands."""
    for case, (arrays, outcome) in zip(cases, run_all(cases, mesh), strict=True):
        assert_close(case.comparison(arrays, outcome, quantize, exact_products=exact_products))
