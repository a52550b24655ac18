"""A `dot_general` as the matmul of the ops: x [..., K] times w [K, *N], whichever way it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from collective_matmul.checks import DTYPES
from collective_matmul.rewrite.graph import Atom, Graph, type_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matmul:
    """A dot without batch dimensions; `x_side` says which operand is x, 0 or 1."""

    equation: JaxprEqn
    x_side: int

    @property
    def x(self) -> Atom:
        """[..., m, ..., K], its dimensions in any order."""
        return self.equation.invars[self.x_side]

    @property
    def w(self) -> Atom:
        """[K, *N], its dimensions in any order."""
        return self.equation.invars[1 - self.x_side]

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Dimensions of x and w contracted with each other, in x's order."""
        contracted, _ = self.equation.params["dimension_numbers"]
        return sorted(zip(contracted[self.x_side], contracted[1 - self.x_side], strict=True))

    @cached_property
    def contracted(self) -> Shape:
        """Dimensions of x."""
        return tuple(x for x, _ in self._pairs)

    @cached_property
    def free(self) -> Shape:
        """Dimensions of x."""
        return tuple(i for i in range(self.x.aval.ndim) if i not in self.contracted)

    @cached_property
    def w_contracted(self) -> Shape:
        """Dimensions of w, in the order of those of x."""
        return tuple(w for _, w in self._pairs)

    @cached_property
    def w_free(self) -> Shape:
        """Dimensions of w."""
        return tuple(i for i in range(self.w.aval.ndim) if i not in self.w_contracted)

    @property
    def free_shape(self) -> Shape:
        """Of x."""
        return tuple(self.x.aval.shape[i] for i in self.free)

    @property
    def columns_shape(self) -> Shape:
        """*N."""
        return tuple(self.w.aval.shape[i] for i in self.w_free)

    @property
    def depth(self) -> int:
        """K."""
        return math.prod(self.x.aval.shape[i] for i in self.contracted)

    @property
    def columns(self) -> int:
        """N."""
        return math.prod(self.columns_shape)

    @property
    def w_lies_transposed(self) -> bool:
        """Whether w is [*N, K] as it lies."""
        return self.w_free + self.w_contracted == tuple(range(self.w.aval.ndim))

    @property
    def moves_layout(self) -> bool:
        """Whether w or the result has to be transposed for the ops."""
        w_lies = self.w_contracted + self.w_free == tuple(range(self.w.aval.ndim))
        return self.x_side == 1 or not (w_lies or self.w_lies_transposed)

    def weight(self, w: jax.Array, transposed: bool) -> jax.Array:
        """W as a matrix [K, N], or [N, K]."""
        first, second = self.w_contracted, self.w_free
        sizes = (self.depth, self.columns)
        if transposed:
            first, second, sizes = second, first, sizes[::-1]
        return lax.reshape(_transpose(w, first + second), sizes)

    def operand(self, x: jax.Array) -> jax.Array:
        """X as [*free, K]."""
        x = _transpose(x, self.free + self.contracted)
        return lax.reshape(x, (*x.shape[: len(self.free)], self.depth))

    def contraction(self, product: jax.Array, transposed: bool) -> jax.Array:
        """The dot's result from xᵀ w [free, N] of an x whose rows it contracts, or from [N, free].

        A transpose stands last, where it may cancel with one that follows the dot.
        """
        if not transposed:
            return self.result(product, self.free_shape)
        product = lax.reshape(product, (*self.columns_shape, *self.free_shape))
        if self.x_side == 1:
            return product
        columns = len(self.columns_shape)
        return _transpose(product, (*range(columns, product.ndim), *range(columns)))

    def result(self, y: jax.Array, free_shape: Shape) -> jax.Array:
        """The dot's result from y [..., N], where x's free dimensions have `free_shape`."""
        y = lax.reshape(y, (*free_shape, *self.columns_shape))
        if self.x_side == 0:
            return y
        rows = len(free_shape)
        return _transpose(y, (*range(rows, y.ndim), *range(rows)))


def matmul_of(equation: JaxprEqn, x_side: int) -> Matmul | str:
    """The dot as a matmul of the ops, or why it is none."""
    _, batch = equation.params["dimension_numbers"]
    if any(batch):
        return "its matmul has batch dimensions"
    return unfit(equation) or Matmul(equation, x_side)


def unfit(equation: JaxprEqn) -> str | None:
    """Why no op carries out a dot, whichever its dimensions; None if one may."""
    parameters = equation.params
    x, w = map(type_of, equation.invars)
    if x.dtype != w.dtype:
        return f"its matmul multiplies {x.dtype} by {w.dtype}"
    if x.dtype not in DTYPES:
        return f"its matmul is of {x.dtype}"
    if _asks_for_precision(parameters["precision"]):
        return f"its matmul asks for precision {parameters['precision']}, which the ops do not take"
    if any(getattr(parameters.get("out_sharding"), "spec", None) or ()):
        return "its matmul asks for a sharding of its result"
    if 0 in (*x.shape, *w.shape):
        return "an empty array: nothing to multiply"
    return None


def result_of(graph: Graph, equation: JaxprEqn) -> tuple[Var, tuple[int, ...]] | str:
    """The variable that holds the product in the operands' dtype, and equations that only cast.

    A product accumulated and returned in a wider dtype, then cast, is rounded once, as by the ops.
    """
    (var,) = equation.outvars
    dtype, result_dtype = type_of(equation.invars[0]).dtype, type_of(var).dtype
    if result_dtype == dtype:
        return var, ()
    user = graph.only_user(var)
    if user is not None and result_dtype.itemsize > dtype.itemsize:
        cast = graph.equations[user]
        if (
            cast.primitive.name == "convert_element_type"
            and type_of(cast.outvars[0]).dtype == dtype
        ):
            return cast.outvars[0], (user,)
    return f"its matmul of {dtype} has a result of {result_dtype}"


def _asks_for_precision(precision: Any) -> bool:
    default = (None, lax.Precision.DEFAULT)
    if isinstance(precision, tuple):
        return any(p not in default for p in precision)
    return precision not in default


def _transpose(array: jax.Array, permutation: tuple[int, ...]) -> jax.Array:
    if permutation == tuple(range(array.ndim)):
        return array
    return lax.transpose(array, permutation)
