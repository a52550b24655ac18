"""Finds dots beside collectives that only einsums can carry out with them.

They have batch dimensions, or contract the dimension that is gathered.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from collective_matmul.equation import Equation
from collective_matmul.rewrite.collective_equations import Collective
from collective_matmul.rewrite.commuting import Step
from collective_matmul.rewrite.gathers import follow
from collective_matmul.rewrite.graph import Atom, Graph, type_of
from collective_matmul.rewrite.matmuls import Shape, result_of, unfit
from collective_matmul.rewrite.sums import back_to_dot


@dataclass(frozen=True)
class EinsumMatch:
    """A dot with one collective, which the einsums of `collective_matmul.einsum` do together.

    Attributes:
      index: of the collective.
      einsum: what the dot computes.
      operands: of the dot, in the einsum's order; the first is what is gathered, if anything is.
      shape: of the second as the einsum has it, reshaped if need be.
      result: of the site.
      steps: on the shard gathered, or on that of the result.
      consumed: equations that the site replaces.
    """

    index: int
    collective: Collective
    einsum: Equation
    operands: tuple[Atom, Atom]
    shape: Shape
    result: Var
    steps: tuple[Step, ...]
    consumed: frozenset[int]

    @property
    def matmuls(self) -> int:
        """How many take part."""
        return 1


def match_einsum(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    """The collective of equation `index` with a dot that is the only one to have to do with it."""
    if collective.kind == "all_gather":
        return _of_gathered(graph, index, collective)
    if collective.kind == "reduce_scatter":
        return _of_scattered(graph, index, collective)
    return None


def _of_gathered(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    chain, view = follow(graph, index, collective)
    joined = None if isinstance(view, str) else _joined(view.base, view.shape)
    if isinstance(view, str) or joined is None:
        return None
    (root,) = graph.equations[chain[-1]].outvars
    dot = graph.only_user(root)
    if dot is None:
        return None
    equation = graph.equations[dot]
    if equation.primitive.name != "dot_general" or unfit(equation):
        return None
    if equation.invars[0] is equation.invars[1]:
        return None
    found = result_of(graph, equation)
    if isinstance(found, str):
        return None
    result, casts = found
    side = 0 if equation.invars[0] is root else 1
    labels, shapes = _apart(equation, side, [[view.base[i] for i in group] for group in joined])
    return EinsumMatch(
        index,
        collective,
        Equation(labels[side], labels[1 - side], labels[2], labels[side][view.dimension]),
        (root, equation.invars[1 - side]),
        shapes[1 - side],
        result,
        view.steps,
        frozenset({*chain, dot, *casts}),
    )


def _of_scattered(graph: Graph, index: int, collective: Collective) -> EinsumMatch | None:
    found = back_to_dot(graph, index, collective)
    if isinstance(found, str):
        return None
    equation, path = found
    if unfit(equation) or path.shape is not None or path.dimension is None:
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
        graph.equations[index].outvars[0],
        path.steps[::-1],
        frozenset(path.consumed),
    )


def _labels(equation: JaxprEqn) -> tuple[str, str, str]:
    """Of the dimensions of a dot's operands and of its result."""
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


def _joined(base: Shape, shape: Shape) -> list[list[int]] | None:
    """Which dimensions of `base` each dimension of `shape` is made of, if they are only joined."""
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


def _apart(
    equation: JaxprEqn, side: int, sizes: list[list[int]]
) -> tuple[tuple[str, str, str], tuple[Shape, Shape]]:
    """Labels and shapes of a dot, with each dimension of one operand taken apart into `sizes`."""
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
