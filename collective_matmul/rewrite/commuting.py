"""What may stand between a collective and its matmul: operations that commute with the collective.

Each is carried out on a shard instead of the whole array. A whole array is described by its shape
and the dimension that is, or will be, divided over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from collective_matmul.rewrite.graph import Atom, Graph, type_of

Shape = tuple[int, ...]
#: Operations on each element that need nothing else.
_ON_ELEMENTS = frozenset({"pvary", "name", "copy", "copy_p", "neg", "optimization_barrier"})
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_OTHERS = frozenset({"transpose", "convert_element_type", "sharding_constraint"})
_KEEPING = frozenset({"reshape", "merge", "name", "optimization_barrier", "copy", "copy_p"})


@dataclass(frozen=True)
class Step:
    """An operation on an array: equal steps do the same."""

    name: str
    details: Any
    apply: Callable[[jax.Array], jax.Array] = field(compare=False)

    @property
    def keeps_values(self) -> bool:
        """Whether the elements stay the same and in the same order in memory."""
        return self.name in _KEEPING


@dataclass(frozen=True)
class Passage:
    """An equation that commutes with collectives, and how dimensions before and after correspond.

    Attributes:
      operand: the array it passes on.
      equation: itself.
      shape_before, shape_after: of whole arrays.
    """

    operand: Atom
    equation: JaxprEqn
    shape_before: Shape
    shape_after: Shape

    @property
    def reshapes(self) -> bool:
        """Whether it is a reshape, whichever primitive says so."""
        return self.equation.primitive.name in _RESHAPES

    @property
    def _permutation(self) -> Shape | None:
        if self.equation.primitive.name != "transpose":
            return None
        return tuple(self.equation.params["permutation"])

    def leaving(self, dimension: int, devices: int) -> int | None:
        """Where a dimension in `devices` blocks ends up, if blocks stay blocks."""
        if self.equation.primitive.name == "sharding_constraint":
            return None if _constrains(self.equation, dimension) else dimension
        if self._permutation:
            return self._permutation.index(dimension)
        return same_blocks(self.shape_before, dimension, self.shape_after, devices)

    def entering(self, dimension: int, devices: int) -> int | None:
        """Where a dimension in `devices` blocks comes from, if blocks were blocks."""
        if self.equation.primitive.name == "sharding_constraint":
            return None if _constrains(self.equation, dimension) else dimension
        if self._permutation:
            return self._permutation[dimension]
        return same_blocks(self.shape_after, dimension, self.shape_before, devices)

    def step(self, graph: Graph, dimension: int | None, devices: int) -> Step:
        """The operation on a shard: `dimension`, of the result, has a `devices`-th of its size."""
        equation, name = self.equation, self.equation.primitive.name
        if self.reshapes:
            shape = divided(self.shape_after, dimension, devices)
            return Step("reshape", shape, lambda array: lax.reshape(array, shape))
        if name in ("mul", "div"):
            (scalar,) = (atom for atom in equation.invars if atom is not self.operand)
            return _scale(name, np.asarray(graph.constant(scalar)))
        params = equation.params

        def apply(array: jax.Array) -> jax.Array:
            result = equation.primitive.bind(array, **params)
            return result[0] if equation.primitive.multiple_results else result

        return Step(name, tuple(sorted((k, str(v)) for k, v in params.items())), apply)


def passage(graph: Graph, equation: JaxprEqn) -> Passage | None:
    """The equation as something to pass; None if it does not commute with collectives."""
    name = equation.primitive.name
    if name in ("mul", "div"):
        operand = _scaled_operand(graph, equation)
        if operand is None:
            return None
    elif name in _ON_ELEMENTS | _RESHAPES | _OTHERS and len(equation.invars) == 1:
        (operand,) = equation.invars
    else:
        return None
    before, after = tuple(type_of(operand).shape), tuple(type_of(equation.outvars[0]).shape)
    if name == "broadcast_in_dim" and math.prod(before) != math.prod(after):
        return None
    if name == "reshape" and equation.params.get("dimensions") is not None:
        return None
    return Passage(operand, equation, before, after)


def same_blocks(before: Shape, dimension: int, after: Shape, devices: int) -> int | None:
    """The dimension of a reshaped array that is in the same `devices` blocks, if there is one.

    In memory an array divided along a dimension is [what is before it, devices, the rest].
    """
    outer = math.prod(before[:dimension])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == outer and size % devices == 0 and size > 0:
            return i
    return None


def divided(shape: Shape, dimension: int | None, devices: int) -> Shape:
    """The shape of a shard."""
    return tuple(size // devices if i == dimension else size for i, size in enumerate(shape))


def _scaled_operand(graph: Graph, equation: JaxprEqn) -> Atom | None:
    """What is multiplied or divided by a constant, keeping its type."""
    for scalar, operand in (equation.invars[::-1], equation.invars):
        if graph.constant(scalar) is not None and not (
            equation.primitive.name == "div" and scalar is equation.invars[0]
        ):
            result, scaled = type_of(equation.outvars[0]), type_of(operand)
            same = (result.shape, result.dtype) == (scaled.shape, scaled.dtype)
            return operand if same and graph.constant(operand) is None else None
    return None


def _scale(name: str, value: np.ndarray) -> Step:
    operation = lax.mul if name == "mul" else lax.div

    def apply(array: jax.Array) -> jax.Array:
        return operation(array, lax.full_like(array, value))

    return Step(name, value.item(), apply)


def _constrains(equation: JaxprEqn, dimension: int) -> bool:
    """Whether a sharding constraint says how to lay a dimension: a shard's may not fit that."""
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return True
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    return dimension < len(spec) and spec[dimension] not in (None, unconstrained)
