"""Equations between a collective and its matmul that commute with the collective.

Each is executed on a shard instead of the whole array. A whole array is described by its shape and
the dimension that is, or will be, divided over the devices.
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

from collective_matmul.jaxprs.graph import Atom, Graph, Shape, type_of

#: Elementwise operations without other operands.
_ELEMENTWISE = frozenset({"pvary", "name", "copy", "copy_p", "neg", "optimization_barrier"})
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_OTHERS = frozenset({"transpose", "convert_element_type", "sharding_constraint"})
#: Shard ops that keep the elements and their order in memory.
_VALUE_PRESERVING = frozenset(
    {"reshape", "merge", "name", "optimization_barrier", "copy", "copy_p"}
)


#: Equations through which a weight keeps having no gradient.
_KEEPING = _ELEMENTWISE | RESHAPES | _OTHERS


def has_no_gradient(graph: Graph, atom: Atom) -> bool:
    """Whether an array is the result of `lax.stop_gradient`, in another layout or dtype perhaps."""
    while (index := graph.producer(atom)) is not None:
        equation = graph.equations[index]
        if equation.primitive.name == "stop_gradient":
            return True
        if equation.primitive.name not in _KEEPING or len(equation.invars) > 1:
            return False
        (atom,) = equation.invars
    return False


@dataclass(frozen=True)
class ShardOp:
    """An operation on a shard. Two that are equal compute the same.

    Attributes:
      name: of the primitive.
      details: the parameters, comparable.
      apply: executes the operation.
    """

    name: str
    details: Any
    apply: Callable[[jax.Array], jax.Array] = field(compare=False)

    @property
    def keeps_values(self) -> bool:
        """Whether the elements and their order in memory stay the same."""
        return self.name in _VALUE_PRESERVING


@dataclass(frozen=True)
class CommutingOp:
    """An equation that commutes with collectives.

    Attributes:
      operand: the array that it transforms.
      equation: the equation itself.
      shape_before: the whole array's shape before it.
      shape_after: the whole array's shape after it.
    """

    operand: Atom
    equation: JaxprEqn
    shape_before: Shape
    shape_after: Shape

    @property
    def reshapes(self) -> bool:
        """Whether it is a reshape, by whichever primitive."""
        return self.equation.primitive.name in RESHAPES

    def exact_factor(self, graph: Graph) -> float | None:
        """The factor, if it only multiplies and the product of any number is exact; else None.

        So are negation and powers of two, apart from overflow and from numbers near zero, where
        float16 has few.
        """
        name = self.equation.primitive.name
        if name == "neg":
            return -1.0
        if name not in ("mul", "div"):
            return None
        (scalar,) = (atom for atom in self.equation.invars if atom is not self.operand)
        factor = float(np.asarray(graph.constant(scalar)).item())
        if abs(factor) != 1 and type_of(self.operand).dtype == np.float16:
            return None
        if factor == 0 or not math.isfinite(factor) or abs(math.frexp(factor)[0]) != 0.5:
            return None
        return factor if name == "mul" else 1 / factor

    @property
    def _permutation(self) -> Shape | None:
        if self.equation.primitive.name != "transpose":
            return None
        return tuple(self.equation.params["permutation"])

    def dimension_after(self, dimension: int, devices: int) -> int | None:
        """The result's dimension that corresponds to `dimension` of the operand.

        None unless the `devices` blocks of that dimension stay contiguous blocks.
        """
        if self.equation.primitive.name == "sharding_constraint":
            return None if _constrains(self.equation, dimension) else dimension
        if self._permutation:
            return self._permutation.index(dimension)
        return same_blocks(self.shape_before, dimension, self.shape_after, devices)

    def dimension_before(self, dimension: int, devices: int) -> int | None:
        """The operand's dimension that corresponds to `dimension` of the result.

        None unless the `devices` blocks of that dimension were contiguous blocks.
        """
        if self.equation.primitive.name == "sharding_constraint":
            return None if _constrains(self.equation, dimension) else dimension
        if self._permutation:
            return self._permutation[dimension]
        return same_blocks(self.shape_after, dimension, self.shape_before, devices)

    def on_shard(self, graph: Graph, dimension: int | None, devices: int) -> ShardOp:
        """The operation, applied to a shard.

        Args:
          graph: the dataflow that the equation is part of.
          dimension: the result's dimension that is divided by `devices`; None if none is.
          devices: the size of the axis.
        """
        equation, name = self.equation, self.equation.primitive.name
        if self.reshapes:
            shape = divided(self.shape_after, dimension, devices)
            return ShardOp("reshape", shape, lambda array: lax.reshape(array, shape))
        if name in ("mul", "div"):
            (scalar,) = (atom for atom in equation.invars if atom is not self.operand)
            return _scale(name, np.asarray(graph.constant(scalar)))
        params = equation.params

        def apply(array: jax.Array) -> jax.Array:
            result = equation.primitive.bind(array, **params)
            return result[0] if equation.primitive.multiple_results else result

        return ShardOp(name, tuple(sorted((k, str(v)) for k, v in params.items())), apply)


def commuting_op(graph: Graph, equation: JaxprEqn) -> CommutingOp | None:
    """The equation as a `CommutingOp`; None if it does not commute with collectives."""
    name = equation.primitive.name
    if name in ("mul", "div"):
        operand = _scaled_operand(graph, equation)
        if operand is None:
            return None
    elif name in _ELEMENTWISE | RESHAPES | _OTHERS and len(equation.invars) == 1:
        (operand,) = equation.invars
    else:
        return None
    before, after = tuple(type_of(operand).shape), tuple(type_of(equation.outvars[0]).shape)
    if name == "broadcast_in_dim" and math.prod(before) != math.prod(after):
        return None
    if name == "reshape" and equation.params.get("dimensions") is not None:
        return None
    return CommutingOp(operand, equation, before, after)


def same_blocks(before: Shape, dimension: int, after: Shape, devices: int) -> int | None:
    """The dimension of a reshaped array that has the same `devices` blocks; None if none has.

    In memory, an array divided along a dimension is [product of the dimensions before, devices, the
    rest].
    """
    outer = math.prod(before[:dimension])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == outer and size % devices == 0 and size > 0:
            return i
    return None


def divided(shape: Shape, dimension: int | None, devices: int) -> Shape:
    """The shape of a shard of an array of this shape; None divides no dimension."""
    return tuple(size // devices if i == dimension else size for i, size in enumerate(shape))


def _scaled_operand(graph: Graph, equation: JaxprEqn) -> Atom | None:
    """The operand that a constant multiplies or divides, if the shape and dtype stay."""
    for scalar, operand in (equation.invars[::-1], equation.invars):
        if graph.constant(scalar) is not None and not (
            equation.primitive.name == "div" and scalar is equation.invars[0]
        ):
            result, scaled = type_of(equation.outvars[0]), type_of(operand)
            same = (result.shape, result.dtype) == (scaled.shape, scaled.dtype)
            return operand if same and graph.constant(operand) is None else None
    return None


def scale(array: jax.Array, factor: float) -> jax.Array:
    """The array times a constant, in its own dtype."""
    if factor in (1, -1):
        return array if factor == 1 else -array
    return lax.mul(array, lax.full_like(array, factor))


def scaling(factor: float) -> ShardOp:
    """A multiplication by a constant, in the array's own dtype."""
    return _scale("mul", np.asarray(factor))


def _scale(name: str, value: np.ndarray) -> ShardOp:
    operation = lax.mul if name == "mul" else lax.div

    def apply(array: jax.Array) -> jax.Array:
        return operation(array, lax.full_like(array, value))

    return ShardOp(name, value.item(), apply)


def _constrains(equation: JaxprEqn, dimension: int) -> bool:
    """Whether a sharding constraint lays out this dimension, which a shard may not allow."""
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return True
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    return dimension < len(spec) and spec[dimension] not in (None, unconstrained)
