"""Finds dots beside collectives that only `collective_einsum` can execute together.

These dots have batch dimensions, or contract the dimension that is gathered.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.graph import Atom, Graph, Shape, type_of
from collective_matmul.ops.matmul.equation import Equation
from collective_matmul.rewrite.find.commuting import ShardOp
from collective_matmul.rewrite.find.supported_collectives import Collective
from collective_matmul.rewrite.match.gathers import follow
from collective_matmul.rewrite.match.matmuls import Matmul, unsupported_dot
from collective_matmul.rewrite.match.sums import back_to_dot


@dataclass(frozen=True)
class EinsumMatch:
    """A collective and the one dot beside it, to be executed as a collective einsum.

    Attributes:
      index: index of the collective's equation.
      collective: the collective.
      einsum: what the dot computes.
      inputs: the dot's operands in the einsum's order. The first is the shard, if one is gathered.
      shape: the second operand's shape in the einsum, which may be a reshape of the array.
      product: the variable that the dot makes.
      result: the variable that the site makes.
      factor: what the result of a scatter is multiplied by, exactly.
      shard_ops: applied to the shard before the gather, or to the shard of the result.
      consumed: indices of the equations that the site replaces.
    """

    index: int
    collective: Collective
    einsum: Equation
    inputs: tuple[Atom, Atom]
    shape: Shape
    product: Var
    result: Var
    factor: float
    shard_ops: tuple[ShardOp, ...]
    consumed: frozenset[int]
    #: No matmuls of the ops.
    terms: tuple[Matmul, ...] = ()

    @property
    def products(self) -> list[Var]:
        """The variables that the dots make."""
        return [self.product]

    @property
    def matmuls(self) -> int:
        """The number of matmuls in the site."""
        return 1


def match_einsum(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    """Matches the collective with the only dot that uses or makes its array; None if it cannot."""
    if collective.kind == "all_gather":
        return _match_gather(graph, index, collective)
    if collective.kind == "reduce_scatter":
        return _match_scatter(graph, index, collective)
    return None


def _match_gather(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    chain, view = follow(graph, index, collective)
    merged = None if isinstance(view, str) else _merged_dimensions(view.base, view.shape)
    if isinstance(view, str) or merged is None:
        return None
    (root,) = graph.equations[chain[-1]].outvars
    dot = graph.only_user(root)
    if dot is None:
        return None
    equation = graph.equations[dot]
    if equation.primitive.name != "dot_general" or unsupported_dot(equation):
        return None
    if equation.invars[0] is equation.invars[1]:
        return None
    side = 0 if equation.invars[0] is root else 1
    labels, shapes = _split_labels(
        equation, side, [[view.base[i] for i in group] for group in merged]
    )
    return EinsumMatch(
        index,
        collective,
        Equation(labels[side], labels[1 - side], labels[2], labels[side][view.dimension]),
        (graph.equations[index].invars[0], equation.invars[1 - side]),
        shapes[1 - side],
        equation.outvars[0],
        equation.outvars[0],
        1.0,
        view.shard_ops,
        frozenset({*chain, dot}),
    )


def _match_scatter(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    found = back_to_dot(graph, index, collective)
    if isinstance(found, str):
        return None
    equation, path = found
    if unsupported_dot(equation) or path.shape is not None or path.dimension is None:
        return None
    labels = _labels(equation)
    label = labels[2][path.dimension]
    side = 0 if label in labels[0] else 1
    a, b = equation.invars[side], equation.invars[1 - side]
    return EinsumMatch(
        index,
        collective,
        Equation(labels[side], labels[1 - side], labels[2], label),
        (a, b),
        tuple(type_of(b).shape),
        equation.outvars[0],
        graph.equations[index].outvars[0],
        path.factor,
        path.shard_ops[::-1],
        frozenset(path.consumed),
    )


def _labels(equation: JaxprEqn) -> tuple[str, str, str]:
    """Einsum labels of a dot: of its two operands and of its result."""
    (contracted, batch) = equation.params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    lhs, rhs = ([""] * type_of(atom).ndim for atom in equation.invars)
    for pairs in (batch, contracted):
        for i, j in zip(*pairs, strict=True):
            lhs[i] = rhs[j] = next(letters)
    shared = "".join(lhs[i] for i in batch[0])
    free = [[i for i, label in enumerate(labels) if not label] for labels in (lhs, rhs)]
    for labels, dimensions in zip((lhs, rhs), free, strict=True):
        for i in dimensions:
            labels[i] = next(letters)
    result = shared + "".join(lhs[i] for i in free[0]) + "".join(rhs[i] for i in free[1])
    return "".join(lhs), "".join(rhs), result


def _merged_dimensions(base: Shape, shape: Shape) -> list[list[int]] | None:
    """For each dimension of `shape`, the dimensions of `base` that it merges.

    None unless `shape` only merges neighbouring dimensions.
    """
    groups, first = [], 0
    for size in shape:
        end = first + 1
        while math.prod(base[first:end]) < size and end < len(base):
            end += 1
        if first == len(base) or math.prod(base[first:end]) != size:
            return None
        groups.append(list(range(first, end)))
        first = end
    return groups if first == len(base) else None


def _split_labels(
    equation: JaxprEqn, side: int, sizes: list[list[int]]
) -> tuple[tuple[str, str, str], tuple[Shape, Shape]]:
    """Labels and shapes of a dot, with the dimensions of one operand split.

    Args:
      equation: the dot.
      side: the operand to split, 0 or 1.
      sizes: for each of its dimensions, the sizes to split it into.

    Returns:
      The labels of both operands and the result, and the shapes of both operands.
    """
    labels = _labels(equation)
    unused = iter(sorted(set(string.ascii_letters) - set("".join(labels))))
    names, parts = {}, {}
    for label, group in zip(labels[side], sizes, strict=True):
        names[label] = label + "".join(next(unused) for _ in group[1:])
        parts[label] = group
    lhs, rhs, result = ("".join(names.get(label, label) for label in each) for each in labels)
    shapes = []
    for atom, each in zip(equation.invars, labels[:2], strict=True):
        taken = [parts.get(label, [n]) for label, n in zip(each, type_of(atom).shape, strict=True)]
        shapes.append(tuple(itertools.chain(*taken)))
    return (lhs, rhs, result), (shapes[0], shapes[1])
