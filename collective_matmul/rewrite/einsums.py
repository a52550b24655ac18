"""Finds dots beside collectives that only `collective_einsum` can carry out with them.

They have batch dimensions, or contract the dimension that is gathered.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from collective_matmul.rewrite.collectives import Collective
from collective_matmul.rewrite.gathers import follow
from collective_matmul.rewrite.graph import Graph, type_of
from collective_matmul.rewrite.matmuls import Shape, result_of, unfit
from collective_matmul.rewrite.steps import Step
from collective_matmul.rewrite.sums import back_to_dot


@dataclass(frozen=True)
class EinsumMatch:
    """A dot with one collective, which `collective_einsum` carries out together.

    Attributes:
      index: of the collective.
      equation: the dot.
      result: of the site.
      subscripts, label: as `collective_einsum` takes them.
      shapes: of the dot's whole operands as the subscripts have them, reshaped if need be.
      gathered: the operand that is gathered; None if the result is scattered.
      steps: on the shard gathered, or on that of the result.
      consumed: equations that the site replaces.
    """

    index: int
    collective: Collective
    equation: JaxprEqn
    result: Var
    subscripts: str
    label: str
    shapes: tuple[Shape, Shape]
    gathered: int | None
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
        equation,
        result,
        _subscripts(labels),
        labels[side][view.dimension],
        shapes,
        side,
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
    lhs, rhs = (tuple(type_of(atom).shape) for atom in equation.invars)
    return EinsumMatch(
        index,
        collective,
        equation,
        graph.equations[index].outvars[0],
        _subscripts(labels),
        labels[2][path.dimension],
        (lhs, rhs),
        None,
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
    groups, i = [], 0
    for size in shape:
        group = [i]
        while math.prod(base[j] for j in group) < size and group[-1] + 1 < len(base):
            group.append(group[-1] + 1)
        groups.append(group)
        i = group[-1] + 1
        if group[-1] >= len(base) or math.prod(base[j] for j in group) != size:
            return None
    return groups if i == len(base) else None


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


def _subscripts(labels: tuple[str, str, str]) -> str:
    lhs, rhs, result = labels
    return f"{lhs},{rhs}->{result}"
