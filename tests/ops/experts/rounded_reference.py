"""Experts with operands in 8 bits, in NumPy: products of rounded numbers, each with its own error.

Rounding is written here once more, in float64 and with the dtypes of ml_dtypes. Activations and
gradients of hidden features are rounded too, which are computed: what is computed a little
differently can round to the next number of 8 bits. So every number comes with a bound of its error
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.3), which passes through a
rounding as the largest change that it can make there. Few numbers are so near to a boundary: the
bound of most results is that of sums and of the program's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import REMOVABLE, MeshFactory
from tests.ops.experts.reference import _SIGMAS, Arrays, Case, Outcome, _derivative

#: Half a unit in the last place of float32, and a number for a few such roundings.
_WIDE = 2.0**-24
_FEW = 8 * _WIDE


class Bounded(NamedTuple):
    """Numbers, and how far what the op computes may be from each."""

    value: Any
    error: Any

    @property
    def T(self) -> Bounded:
        return Bounded(self.value.swapaxes(-1, -2), self.error.swapaxes(-1, -2))

    def __getitem__(self, index: Any) -> Any:
        return Bounded(self.value[index], self.error[index])

    def times(self, other: Bounded) -> Bounded:
        """The elementwise product, in float32."""
        product = self.value * other.value
        error = abs(self.value) * other.error + self.error * (abs(other.value) + other.error)
        return Bounded(product, error + _FEW * (abs(product) + error))

    def matmul(self, other: Bounded) -> Bounded:
        """The product of matrices, added in float32 in any order."""
        size, theirs = abs(self.value), abs(other.value) + other.error
        error = size @ other.error + self.error @ theirs
        terms = self.value.shape[-1] + 2
        return Bounded(self.value @ other.value, error + terms * _WIDE * (size @ theirs))

    def plus(self, other: Bounded) -> Bounded:
        error = self.error + other.error
        size = abs(self.value) + abs(other.value) + error
        return Bounded(self.value + other.value, error + 2 * _WIDE * size)

    def rounded(self, unit: float) -> Bounded:
        """Rounded to a dtype with this unit roundoff, once."""
        return Bounded(self.value, self.error + unit * (abs(self.value) + self.error))


def exactly(array: Any) -> Bounded:
    wide = np.asarray(array).astype(np.float64)
    return Bounded(wide, np.zeros_like(wide))


class Numbers(NamedTuple):
    """The numbers of a dtype: how others are rounded to them, and the largest."""

    rounded: Callable[[np.ndarray], np.ndarray]
    largest: float

    def of(self, x: np.ndarray) -> np.ndarray:
        # Beyond the largest there are extremes of bounds alone: scales see to that.
        return self.rounded(np.clip(x, -self.largest, self.largest))


def _float8(name: str) -> Numbers:
    dtype = jnp.dtype(name)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(dtype).astype(np.float64)

    return Numbers(rounded, float(jnp.finfo(dtype).max))


E4M3, E5M2 = _float8("float8_e4m3fn"), _float8("float8_e5m2")


@dataclass(frozen=True)
class Rule:
    """How a format rounds.

    Attributes:
      per_row: numbers of a row that have a scale in common; None: all.
      per_matrix: what has a scale of its own of a matrix.
      packs: whether weight gradients are computed from what was rounded.
      numbers, gradient_numbers: of operands, and of gradients of results.
      powers: whether scales are powers of two.
      joint: whether operands of one sum have scales in common.
    """

    per_row: int | None = None
    per_matrix: Literal["matrix", "column", "block"] = "column"
    packs: bool = False
    numbers: Numbers = E4M3
    gradient_numbers: Numbers = E4M3
    powers: bool = False
    joint: bool = True

    def rows(self, xs: Sequence[Bounded], *, of_gradient: bool = False) -> list[Bounded]:
        """Each row [M, K_i] by itself; those of one sum together."""
        numbers = self.gradient_numbers if of_gradient else self.numbers
        largest = functools.partial(_over_blocks, blocks=(1, self.per_row))
        return self._rounded(xs, largest, numbers)

    def matrices(self, ws: Sequence[Bounded]) -> list[Bounded]:
        """Matrices [K, N]; those of one sum together."""
        blocks = {"matrix": (None, None), "column": (None, 1), "block": (128, 128)}
        largest = functools.partial(_over_blocks, blocks=blocks[self.per_matrix])
        return self._rounded(ws, largest, self.numbers)

    def _rounded(self, xs: Sequence[Bounded], largest: Callable, numbers: Numbers) -> list[Bounded]:
        bounds = []
        for sign in (-1, 0, 1):
            each = [largest(np.maximum(abs(x.value) + sign * x.error, 0)) for x in xs]
            if self.joint and len(xs) > 1:
                each = [functools.reduce(np.maximum, each)] * len(xs)
            bounds.append([self._scale(e, numbers) for e in each])
        low, middle, high = bounds
        scales = zip(xs, low, middle, high, strict=True)
        return [self._divided(*each, numbers) for each in scales]

    def _scale(self, largest: np.ndarray, numbers: Numbers) -> np.ndarray:
        scale = np.maximum(largest / numbers.largest, 2.0**-126)
        return 2.0 ** np.ceil(np.log2(scale)) if self.powers else scale

    def _divided(self, x: Bounded, low: Any, scale: Any, high: Any, numbers: Numbers) -> Bounded:
        """Rounded, with the largest change that other values and scales would make."""
        value = numbers.of(x.value / scale) * scale
        # Rounding is monotone: extremes of its argument have the extremes of its results.
        slack = x.error + 4 * _WIDE * abs(x.value)  # Scales and quotients are float32.
        others = [
            numbers.of((x.value + sign * slack) / other) * other
            for sign in (-1, 1)
            for other in (low, high)
        ]
        error = np.max([abs(other - value) for other in others], 0)
        size = abs(value) + error
        if not self.powers:
            error = error + size * ((high - low) / scale + 4 * _WIDE)
        return Bounded(value, error)


RULES = {
    "tensorwise": Rule(per_matrix="matrix", packs=True, gradient_numbers=E5M2, powers=True),
    "rowwise": Rule(),
    "blockwise": Rule(per_row=128, per_matrix="block", joint=False),
}


def _over_blocks(x: np.ndarray, blocks: Sequence[int | None]) -> np.ndarray:
    """The largest number of each block, in the place of all of its numbers."""
    result = np.empty_like(x)
    sizes = [size or max(1, length) for size, length in zip(blocks, x.shape, strict=True)]
    for i in range(0, x.shape[0], sizes[0]):
        for j in range(0, x.shape[1], sizes[1]):
            part = np.s_[i : i + sizes[0], j : j + sizes[1]]
            result[part] = x[part].max()
    return result


def rounded_reference(case: Case, arrays: Arrays, rule: Rule) -> Outcome:
    """The outcome, each number `Bounded`."""
    x, ids, p, *ws, dy = arrays
    xs, dys, ps = exactly(x), exactly(dy), exactly(p)
    unit = float(jnp.finfo(case.dtype).eps) / 2
    shards = case.axes.get("hidden", 1)
    parts = []
    for part in range(shards):
        own = [np.split(w, shards, axis)[part] for w, axis in zip(ws, (2, 2, 1), strict=True)]
        parts.append(_Experts(case, rule, unit, xs, dys, ps, ids, own).outcome())
    joined = [
        Bounded(
            *(np.concatenate(each, axis) for each in zip(*(part[i] for part in parts), strict=True))
        )
        for i, axis in ((3, 2), (4, 2), (5, 1))
    ]
    sums = [functools.reduce(Bounded.plus, [part[i] for part in parts]) for i in range(3)]
    return Outcome(*sums, *joined)


@dataclass
class _Experts:
    """All experts, with the hidden features of one device."""

    case: Case
    rule: Rule
    unit: float
    x: Bounded
    dy: Bounded
    p: Bounded
    ids: np.ndarray
    ws: Sequence[np.ndarray]

    def outcome(self) -> Outcome:
        rule = self.rule
        (x,), (dy,) = rule.rows([self.x]), rule.rows([self.dy], of_gradient=True)
        self.rounded_x, self.rounded_dy = (each.rounded(self.unit) for each in (x, dy))
        arrays = self.x.value, self.x.value, self.p.value, *self.ws
        self.made = Outcome(*(exactly(np.zeros_like(a, np.float64)) for a in arrays))
        # Magnitudes of all terms: sums of the program's dtype are off by units of them.
        self.sizes = Outcome(*(np.zeros_like(a, np.float64) for a in arrays))
        for expert in range(len(self.ws[0])):
            tokens, choices = np.nonzero(self.ids == expert)
            if tokens.size:
                self._add(expert, tokens, choices)
        # A token's sum on a device, and that over devices; a sum for each visit and each shard.
        devices = math.prod(self.case.axes.values())
        sums = Outcome(2, 2, 0, *[2 * devices] * 3)
        terms = 2 + self.ids.size + devices
        return Outcome(
            *(
                Bounded(value, error + (count * self.unit + terms * _WIDE) * (size + error))
                for (value, error), size, count in zip(self.made, self.sizes, sums, strict=True)
            )
        )

    def _matrices(self, expert: int, *numbers: int, transposed: bool = False) -> list[Bounded]:
        ws = [exactly(self.ws[number][expert]) for number in numbers]
        rounded = self.rule.matrices([w.T for w in ws] if transposed else ws)
        return [w.rounded(self.unit) for w in rounded]

    def _rows(self, *xs: Bounded) -> list[Bounded]:
        return [x.rounded(self.unit) for x in self.rule.rows(xs, of_gradient=len(xs) > 1)]

    def _add(self, expert: int, tokens: np.ndarray, choices: np.ndarray) -> None:
        unit, p = self.unit, self.p[tokens, choices][:, None]
        (w_gate,), (w_up,), (w_down,) = (self._matrices(expert, number) for number in range(3))
        x, dy = self.rounded_x[tokens], self.rounded_dy[tokens]
        gate, up = x.matmul(w_gate).rounded(unit), x.matmul(w_up).rounded(unit)
        sigma = _SIGMAS[self.case.activation]
        sigma_of = self._smooth(sigma, gate)
        activated = sigma_of.times(up)
        (rows,) = self._rows(activated.rounded(unit))
        self._scatter("y", tokens, p.times(rows.matmul(w_down).rounded(unit)))

        (w,) = self._matrices(expert, 2, transposed=True)
        gradient = dy.matmul(w).rounded(unit)
        products = gradient.times(activated)
        summed = products.matmul(exactly(np.ones((products.value.shape[1], 1))))
        self._scatter("dweights", (tokens, choices), summed[:, 0])
        weighted = p.times(gradient)
        slope = self._smooth(lambda g: _derivative(sigma, g), gate)
        dgate = weighted.times(up).times(slope).rounded(unit)
        dup = weighted.times(sigma_of).rounded(unit)
        pairs = zip(
            self._rows(dgate, dup), self._matrices(expert, 0, 1, transposed=True), strict=True
        )
        dx = functools.reduce(Bounded.plus, [rows.matmul(w) for rows, w in pairs])
        self._scatter("dx", tokens, dx.rounded(unit))

        if not self.rule.packs:
            x, dy = self.x[tokens], self.dy[tokens]
        pa = p.times(activated).rounded(unit)
        for name, left, right in (("dw_gate", x, dgate), ("dw_up", x, dup), ("dw_down", pa, dy)):
            size = abs(left.value).T @ abs(right.value)
            self._scatter(name, [expert], left.T.matmul(right)[None], size[None])

    @staticmethod
    def _smooth(fun: Callable, x: Bounded) -> Bounded:
        """An activation or its first derivative, whose own derivatives are at most 1.2."""
        value = fun(x.value)
        # Derivatives by differences are off by less than 1e-10.
        return Bounded(value, 1.2 * x.error + _FEW * (abs(value) + 1) + 1e-10)

    def _scatter(self, name: str, index: Any, terms: Bounded, size: Any = None) -> None:
        value, error = getattr(self.made, name)
        np.add.at(value, index, terms.value)
        np.add.at(error, index, terms.error)
        np.add.at(getattr(self.sizes, name), index, abs(terms.value) if size is None else size)


def assert_rounded_close(actual: Outcome, case: Case, arrays: Arrays, rule: Rule) -> None:
    """Every element is within the bound of its error; NaN never is."""
    expected = rounded_reference(case, arrays, rule)
    for name, value, (wanted, error) in zip(Outcome._fields, actual, expected, strict=True):
        off = abs(np.asarray(value).astype(np.float64) - wanted)
        wrong = ~(off <= error + 1e-30)
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size} elements are off, the first by"
            f" {off[wrong][0]:.3g} where {error[wrong][0]:.3g} is allowed"
        )


def check(case: Case, make_mesh: MeshFactory, run: Callable, rule: Rule, seed: int = 0) -> Outcome:
    """Runs the case and compares all with the reference."""
    arrays = case.arrays(seed)
    actual = run(case.program(make_mesh(dict(case.axes))))(arrays)
    assert_rounded_close(actual, case, arrays, rule)
    return actual


def case_of(
    fp8: str, axes: Mapping[str, int], implementation: Any = "xla", **attributes: Any
) -> Case:
    """A case. Pallas' interpreter cannot run where `shard_map` checks types."""
    options = {"fp8": fp8, **attributes.pop("options", {})}
    made = {"check_vma": attributes.get("grouped", "xla") == "xla", "width": 16, "hidden": 24}
    return Case(axes, implementation, options=options, **(made | attributes))


def recipes(quick: Sequence[str] = tuple(RULES)) -> pytest.MarkDecorator:
    """Tests each recipe; those that are not quick are exhaustive."""
    return pytest.mark.parametrize(
        "fp8", [recipe(fp8, () if fp8 in quick else (pytest.mark.exhaustive,)) for fp8 in RULES]
    )


def recipe(fp8: str, marks: Sequence[Any] = (), *others: Any) -> Any:
    """A parameter, with a recipe that may have been taken out, and further values."""
    needed = [pytest.mark.needs(fp8)] if fp8 in REMOVABLE else []
    return pytest.param(fp8, *others, marks=[*needed, *marks])
