"""Equations between a collective and its matmul that commute with the collective.

Each is executed on a shard instead of the whole array. A whole array is described by its shape and
the dimension that is, or will be, divided over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
      constant: the scalar that multiplies or divides; None for any other operation.
    """

    operand: Atom
    equation: JaxprEqn
    constant: np.ndarray | None = None

    @property
    def shape_before(self) -> Shape:
        """The whole array's shape before it."""
        return tuple(type_of(self.operand).shape)

    @property
    def shape_after(self) -> Shape:
        """The whole array's shape after it."""
        return tuple(type_of(self.equation.outvars[0]).shape)

    @property
    def reshapes(self) -> bool:
        """Whether it is a reshape, by whichever primitive."""
        return self.equation.primitive.name in RESHAPES

    @property
    def exact_factor(self) -> float | None:
        """The factor, if it only multiplies and the product of any number is exact; else None.

        So are negation and powers of two, apart from overflow and from numbers near zero, where
        float16 has few.
        """
        if self.equation.primitive.name == "neg":
            return -1.0
        if self.constant is None:
            return None
        factor = float(self.constant.item())
        if abs(factor) != 1 and type_of(self.operand).dtype == np.float16:
            return None
        if factor == 0 or not math.isfinite(factor) or abs(math.frexp(factor)[0]) != 0.5:
            return None
        return factor if self.equation.primitive.name == "mul" else 1 / factor

    def dimension(self, dimension: int, devices: int, *, before: bool = False) -> int | None:
        """The result's dimension that corresponds to `dimension` of the operand.

        None unless the `devices` blocks of that dimension stay contiguous blocks.

        Args:
          dimension: the operand's dimension.
          devices: the size of the axis.
          before: the other way: find the operand's dimension from the result's.
        """
        name, params = self.equation.primitive.name, self.equation.params
        if name == "sharding_constraint":
            return None if _constrains(self.equation, dimension) else dimension
        if name == "transpose":
            permutation = tuple(params["permutation"])
            return permutation[dimension] if before else permutation.index(dimension)
        shapes = self.shape_before, self.shape_after
        start, end = shapes[::-1] if before else shapes
        return same_blocks(start, dimension, end, devices)

    def on_shard(self, dimension: int | None, devices: int) -> ShardOp:
        """The operation on a shard.

        Args:
          dimension: the result's dimension that is divided by `devices`; None if none is.
          devices: the size of the axis.
        """
        equation, name = self.equation, self.equation.primitive.name
        if self.reshapes:
            return reshaping(divided(self.shape_after, dimension, devices))
        if self.constant is not None:
            return _scale(name, self.constant)
        params = equation.params

        def apply(array: jax.Array) -> jax.Array:
            result = equation.primitive.bind(array, **params)
            return result[0] if equation.primitive.multiple_results else result

        return ShardOp(name, tuple(sorted((k, str(v)) for k, v in params.items())), apply)


def commuting_op(graph: Graph, equation: JaxprEqn) -> CommutingOp | None:
    """The equation as a `CommutingOp`; None if it does not commute with collectives."""
    name = equation.primitive.name
    if name in ("mul", "div"):
        return _scaling_op(graph, equation)
    if name not in _KEEPING or len(equation.invars) != 1:
        return None
    op = CommutingOp(equation.invars[0], equation)
    if name == "broadcast_in_dim" and math.prod(op.shape_before) != math.prod(op.shape_after):
        return None
    if name == "reshape" and equation.params.get("dimensions") is not None:
        return None
    return op


def back_through(
    graph: Graph,
    atom: Atom,
    commutes: Callable[[Graph, JaxprEqn], CommutingOp | None] = commuting_op,
) -> Iterator[tuple[int, CommutingOp | None]]:
    """Yields the equations that make an array, the last first, back to one that does not commute.

    Args:
      graph: dataflow of the jaxpr.
      atom: the array.
      commutes: returns an equation as an op; None for the one that comes last, with its index.
    """
    while (index := graph.producer(atom)) is not None:
        op = commutes(graph, graph.equations[index])
        yield index, op
        if op is None:
            return
        atom = op.operand


def _scaling_op(graph: Graph, equation: JaxprEqn) -> CommutingOp | None:
    """A multiplication or a division by a constant, if the shape and dtype stay."""
    first, second = equation.invars
    scalar, operand = second, first
    if (constant := graph.constant(scalar)) is None and equation.primitive.name == "mul":
        scalar, operand = first, second
        constant = graph.constant(scalar)
    if constant is None or graph.constant(operand) is not None:
        return None
    result, scaled = type_of(equation.outvars[0]), type_of(operand)
    same = (result.shape, result.dtype) == (scaled.shape, scaled.dtype)
    return CommutingOp(operand, equation, np.asarray(constant)) if same else None


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


def scale(array: jax.Array, factor: float) -> jax.Array:
    """The array times a constant, in its own dtype."""
    if factor in (1, -1):
        return array if factor == 1 else -array
    return lax.mul(array, lax.full_like(array, factor))


def reshaping(shape: Shape) -> ShardOp:
    """A reshape of a shard."""
    return ShardOp("reshape", shape, lambda array: lax.reshape(array, shape))


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
