"""Dependencies between the equations of a jaxpr, some of which replacements execute together.

A replacement that executes several equations at once waits for all that any of them reads. Two
equations may therefore be executed together only if no equation in between reads one and makes
what the other reads, by itself or through other replacements.
"""

from __future__ import annotations

import heapq
import itertools
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.graph import Atom, Graph, is_pure, variables


@dataclass(frozen=True, eq=False)
class EquationGroup:
    """Equations that one replacement executes together.

    Attributes:
      equations: their indices.
      inputs: what the replacement reads.
    """

    equations: frozenset[int]
    inputs: tuple[Atom, ...]


class Dependencies:
    """What each equation of a jaxpr waits for, given the equations that are executed together.

    Args:
      graph: dataflow of the jaxpr.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._group_of: ChainMap[int, EquationGroup] = ChainMap()
        effects = [i for i, equation in enumerate(graph.equations) if not is_pure(equation)]
        self._previous_effect = dict(zip(effects[1:], effects, strict=False))

    def copy(self) -> Dependencies:
        """A copy to which equations can be added without changing this one."""
        copied = Dependencies.__new__(Dependencies)
        copied._graph, copied._previous_effect = self._graph, self._previous_effect
        copied._group_of = self._group_of.new_child()
        return copied

    def add(self, group: EquationGroup) -> None:
        """From now on, these equations are executed together. Check `allows` first."""
        self._group_of.update(dict.fromkeys(group.equations, group))

    def allows(self, group: EquationGroup) -> bool:
        """Whether the equations can be executed together: their inputs depend on none of them."""
        floor = self._floor(min(group.equations))
        seen: set[int] = set()
        waiting = self._makers(group.inputs)
        while waiting:
            index = waiting.pop()
            if index in group.equations:
                return False
            if index in seen or index < floor:
                continue
            executed_with = self._group_of.get(index)
            if executed_with is None:
                seen.add(index)
                waiting += self._makers(self._graph.equations[index].invars)
                if index in self._previous_effect:
                    waiting.append(self._previous_effect[index])
            else:
                seen |= executed_with.equations
                waiting += self._makers(executed_with.inputs)
        return True

    def _makers(self, atoms: Iterable[Atom]) -> list[int]:
        producers = map(self._graph.producer, atoms)
        return [index for index in producers if index is not None]

    def _floor(self, first: int) -> int:
        """The index before which no equation waits for equation `first` or a later one.

        Values flow to later equations, except through equations that are executed together.
        """
        groups = {group.equations for group in self._group_of.values()}
        spans = [(min(indices), max(indices)) for indices in groups]
        while reaching := [low for low, high in spans if low < first <= high]:
            first = min(reaching)
        return first


def spliced(
    jaxpr: Jaxpr,
    kept: Iterable[tuple[int, JaxprEqn]],
    made: Iterable[tuple[int, Sequence[JaxprEqn]]],
) -> Jaxpr:
    """A jaxpr with other equations, each after what it reads and after effects before it.

    Args:
      jaxpr: the jaxpr.
      kept: equations with their indices.
      made: equations that stay together, with the index before which they come.
    """
    placed = [(index, 0, equations) for index, equations in made]
    placed += [(index, 1, [equation]) for index, equation in kept]
    equations = _in_order([each for _, _, each in sorted(placed, key=lambda item: item[:2])])
    effects = frozenset(jaxpr.effects).union(*(equation.effects for equation in equations))
    return jaxpr.replace(eqns=equations, effects=effects)


def _in_order(order: Sequence[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Groups of equations in this order, as far as what they read and their effects allow."""
    makers: dict[Any, int] = {}
    for rank, equations in enumerate(order):
        for equation in equations:
            makers.update(dict.fromkeys(equation.outvars, rank))
    waits_for = {
        rank: {makers[v] for e in equations for v in variables(e.invars) if v in makers} - {rank}
        for rank, equations in enumerate(order)
    }
    effects = [rank for rank, equations in enumerate(order) if not all(map(is_pure, equations))]
    for before, after in itertools.pairwise(effects):
        waits_for[after].add(before)
    sorter = TopologicalSorter(waits_for)
    sorter.prepare()
    ready: list[int] = []
    result: list[JaxprEqn] = []
    while sorter.is_active():
        for rank in sorter.get_ready():
            heapq.heappush(ready, rank)
        rank = heapq.heappop(ready)
        result += order[rank]
        sorter.done(rank)
    return result
