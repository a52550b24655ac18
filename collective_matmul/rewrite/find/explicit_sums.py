"""Finds sums of dots that contract what an Explicit mesh axis shards, by the types of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Set

from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.graph import Atom, Graph, type_of
from collective_matmul.rewrite.find.manual_regions import ADDITIONS, commutes, other_axes_stay
from collective_matmul.rewrite.find.placements import PARTIAL, placement, sums


def summands(
    graph: Graph,
    axis: str,
    trees: dict[int, tuple[int, ...]],
    asking: Set[int],
    taken: Set[int],
) -> Iterator[int]:
    """Yields the equations at which sums of dots end.

    Args:
      graph: the jaxpr.
      axis: the mesh axis.
      trees: filled with the equations that make a summand of each device, for each result.
      asking: indices of dots and reshards of arrays that the axis shards.
      taken: indices of equations that belong to other regions.
    """
    for index, equation in enumerate(graph.equations):
        if index in taken:
            continue
        if index in asking and sums(equation, axis):
            trees[index] = (index,)
            continue
        makers = [_summand(graph, atom, trees) for atom in _operands(graph, equation, axis)]
        if makers and None not in makers:
            parts = {part for maker in makers for part in trees[maker or 0]}
            trees[index] = (*sorted(parts), index)
    for index in trees:
        (var,) = graph.equations[index].outvars
        user = graph.only_user(var)
        if user not in trees:
            yield index


def _summand(graph: Graph, atom: Atom, trees: dict[int, tuple[int, ...]]) -> int | None:
    """The index of what makes a summand that nothing else needs."""
    index = graph.producer(atom)
    return index if index in trees and graph.only_user(atom) is not None else None


def _operands(graph: Graph, equation: JaxprEqn, axis: str) -> list[Atom]:
    """The operands of an equation that gives the same before and after the sum of each."""
    name = equation.primitive.name
    if name in ADDITIONS:
        first, second = equation.invars
        same = type_of(first).shape == type_of(second).shape and first is not second
        return [first, second] if same else []
    if name == "reshard":
        (before,), (after,) = equation.invars, equation.outvars
        stays = other_axes_stay(before, after, axis) and isinstance(before, Var)
        return [before] if stays and placement(before, axis) in (None, PARTIAL) else []
    op = commutes(graph, equation)
    return [] if op is None else [op.operand]
