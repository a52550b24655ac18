"""A `dot_general` as the matmul of the ops: x [..., K] times w [K, *N].

The operands of the dot may have any order and any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from collective_matmul.jaxprs.graph import Atom, Shape, type_of
from collective_matmul.jaxprs.sources import described
from collective_matmul.ops.matmul.checks import DTYPES


@dataclass(frozen=True)
class Matmul:
    """A dot without batch dimensions.

    Attributes:
      equation: the `dot_general`.
      x_side: which operand is x, 0 or 1.
    """

    equation: JaxprEqn
    x_side: int

    @property
    def x(self) -> Atom:
        """The operand [..., m, ..., K], its dimensions in any order."""
        return self.equation.invars[self.x_side]

    @property
    def w(self) -> Atom:
        """The operand [K, *N], its dimensions in any order."""
        return self.equation.invars[1 - self.x_side]

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of contracted dimensions of x and w, in x's order."""
        contracted, _ = self.equation.params["dimension_numbers"]
        return sorted(zip(contracted[self.x_side], contracted[1 - self.x_side], strict=True))

    @cached_property
    def contracted(self) -> Shape:
        """The contracted dimensions of x."""
        return tuple(x for x, _ in self._pairs)

    @cached_property
    def free(self) -> Shape:
        """The other dimensions of x."""
        return tuple(i for i in range(self.x.aval.ndim) if i not in self.contracted)

    @cached_property
    def w_contracted(self) -> Shape:
        """The contracted dimensions of w, in the order of `contracted`."""
        return tuple(w for _, w in self._pairs)

    @cached_property
    def w_free(self) -> Shape:
        """The other dimensions of w."""
        return tuple(i for i in range(self.w.aval.ndim) if i not in self.w_contracted)

    @property
    def free_shape(self) -> Shape:
        """The sizes of x's free dimensions."""
        return tuple(self.x.aval.shape[i] for i in self.free)

    @property
    def columns_shape(self) -> Shape:
        """*N, the sizes of w's free dimensions."""
        return tuple(self.w.aval.shape[i] for i in self.w_free)

    @property
    def depth(self) -> int:
        """K, the number of contracted elements."""
        return math.prod(self.x.aval.shape[i] for i in self.contracted)

    @property
    def columns(self) -> int:
        """N, the product of `columns_shape`."""
        return math.prod(self.columns_shape)

    @property
    def w_is_transposed(self) -> bool:
        """Whether w is stored as [*N, K]."""
        return self.w_free + self.w_contracted == tuple(range(self.w.aval.ndim))

    @property
    def transposes(self) -> bool:
        """Whether the ops need x, w or the result transposed."""
        x_is_plain = self.free + self.contracted == tuple(range(self.x.aval.ndim))
        w_is_plain = self.w_contracted + self.w_free == tuple(range(self.w.aval.ndim))
        return self.x_side == 1 or not (x_is_plain and (w_is_plain or self.w_is_transposed))

    def weight(self, w: jax.Array, transposed: bool) -> jax.Array:
        """W, or a block of it, as a matrix [K, N], or [N, K] if `transposed`."""
        first, second = self.w_contracted, self.w_free
        if transposed:
            first, second = second, first
        w = _transpose(w, first + second)
        sizes = math.prod(w.shape[: len(first)]), math.prod(w.shape[len(first) :])
        if min(len(first), len(second)) > 1:
            # Explicit mesh axes allow to merge one group of dimensions at a time.
            w = lax.reshape(w, (sizes[0], *w.shape[len(first) :]))
        return lax.reshape(w, sizes)

    def operand(self, x: jax.Array) -> jax.Array:
        """X as [*free, K]."""
        x = _transpose(x, self.free + self.contracted)
        return lax.reshape(x, (*x.shape[: len(self.free)], self.depth))

    def contraction(self, product: jax.Array, transposed: bool) -> jax.Array:
        """The dot's result, where the dot is a weight gradient that contracts x's rows.

        A transpose comes last, where it may cancel with one that follows the dot.

        Args:
          product: xᵀ w [free, N], or [N, free] if `transposed`.
          transposed: the layout of `product`.
        """
        if not transposed:
            return self.result(product, self.free_shape)
        product = lax.reshape(product, (*self.columns_shape, *self.free_shape))
        if self.x_side == 1:
            return product
        columns = len(self.columns_shape)
        return _transpose(product, (*range(columns, product.ndim), *range(columns)))

    def result(self, y: jax.Array, free_shape: Shape) -> jax.Array:
        """The dot's result from y [..., N]; `free_shape` are the sizes of x's free dimensions."""
        y = lax.reshape(y, (*free_shape, *self.columns_shape))
        if self.x_side == 0:
            return y
        rows = len(free_shape)
        return _transpose(y, (*range(rows, y.ndim), *range(rows)))


def matmul_of(equation: JaxprEqn, x_side: int, *, rows_needed: bool = False) -> Matmul | str:
    """The dot as a matmul of the ops, or why it is not one.

    Args:
      equation: the dot.
      x_side: which operand is x.
      rows_needed: whether x must have another dimension than those that are contracted.
    """
    matmul, (_, batch) = Matmul(equation, x_side), equation.params["dimension_numbers"]
    reason = "its matmul has batch dimensions" if any(batch) else unsupported_dot(equation)
    if reason is None and not (matmul.w_free and (matmul.free or not rows_needed)):
        reason = "its matmul is a matrix times a vector"
    return matmul if reason is None else f"{reason} ({described(equation)})"


def unsupported_dot(equation: JaxprEqn) -> str | None:
    """Why no op can execute a dot, whatever its dimensions; None if one may."""
    parameters = equation.params
    x, w = map(type_of, equation.invars)
    if x.dtype != w.dtype:
        return f"its matmul multiplies {x.dtype} by {w.dtype}"
    if x.dtype not in DTYPES:
        return f"its matmul is of {x.dtype}"
    result = type_of(equation.outvars[0]).dtype
    if result != x.dtype:
        return f"its matmul of {x.dtype} has a result of {result}"
    if _asks_for_precision(parameters["precision"]):
        return f"its matmul asks for precision {parameters['precision']}, which the ops do not take"
    if getattr(getattr(parameters.get("out_sharding"), "spec", None), "unreduced", None):
        return "its matmul leaves its result unreduced over an explicit mesh axis (out_sharding)"
    if 0 in (*x.shape, *w.shape):
        return "an empty array: nothing to multiply"
    return None


def _asks_for_precision(precision: Any) -> bool:
    default = (None, lax.Precision.DEFAULT)
    if isinstance(precision, tuple):
        return any(p not in default for p in precision)
    return precision not in default


def _transpose(array: jax.Array, permutation: tuple[int, ...]) -> jax.Array:
    if permutation == tuple(range(array.ndim)):
        return array
    return lax.transpose(array, permutation)
