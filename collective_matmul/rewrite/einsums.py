"""Finds dots beside collectives that only `collective_einsum` can carry out with them.

They have batch dimensions, or contract the dimension that is gathered.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from collective_matmul.rewrite.collectives import Collective
from collective_matmul.rewrite.gathers import follow
from collective_matmul.rewrite.graph import Graph, type_of
from collective_matmul.rewrite.matmuls import result_of, unfit
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
    if isinstance(view, str) or view.shape != view.base:
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
    labels = _labels(equation)
    return EinsumMatch(
        index,
        collective,
        equation,
        result,
        _subscripts(labels),
        labels[side][view.dimension],
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
    return EinsumMatch(
        index,
        collective,
        equation,
        graph.equations[index].outvars[0],
        _subscripts(labels),
        labels[2][path.dimension],
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


def _subscripts(labels: tuple[str, str, str]) -> str:
    lhs, rhs, result = labels
    return f"{lhs},{rhs}->{result}"
