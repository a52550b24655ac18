"""Selects the sites of one jaxpr to replace, so that values are still made before their uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from collective_matmul.rewrite.einsum_matches import EinsumMatch
from collective_matmul.rewrite.gathers import GatheredDot, GatherMatch
from collective_matmul.rewrite.graph import Atom, Graph, is_pure, variables
from collective_matmul.rewrite.grouped_wgrad import GroupedWgrad, group_immediate, group_wgrads
from collective_matmul.rewrite.sums import SumMatch

Match = GatherMatch | SumMatch | EinsumMatch


@dataclass(frozen=True)
class PlacedMatch:
    """A match with the position at which its replacement is inserted.

    Attributes:
      match: the match.
      consumed: indices of the equations that it replaces.
      position: index of the equation before which it is inserted.
      moved: indices of later equations that must be moved before the position, in order.
      immediate_wgrads: weight gradients that are computed with the gather.
      later_wgrads: weight gradients that are computed later.
    """

    match: Match
    consumed: frozenset[int]
    position: int
    moved: tuple[int, ...] = ()
    immediate_wgrads: tuple[GroupedWgrad, ...] = ()
    later_wgrads: tuple[GroupedWgrad, ...] = ()


class SiteSelection:
    """The sites of one jaxpr that are to be replaced.

    Attributes:
      graph: dataflow of the jaxpr.
      placed: the accepted sites.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.placed: list[PlacedMatch] = []
        self._consumed: set[int] = set()
        self._moved: set[int] = set()
        #: Equations whose results sites need at their positions.
        self._needed: set[int] = set()
        #: Equations that wait for weight gradients, and the index before which each comes.
        self._deferred: dict[int, int] = {}

    def accept(self, placed: PlacedMatch) -> None:
        """Accepts a site. No other site may consume its equations."""
        self.placed.append(placed)
        self._consumed |= placed.consumed
        self._moved |= set(placed.moved)
        atoms = [atom for index in placed.moved for atom in self.graph.equations[index].invars]
        if isinstance(placed.match, GatherMatch):
            atoms += [dot.matmul.w for dot in placed.match.dots]
        atoms += [dot.matmul.w for group in placed.immediate_wgrads for dot in group.dots]
        producers = map(self.graph.producer, atoms)
        self._needed.update(index for index in producers if index is not None)
        for group in placed.later_wgrads:
            later = [*group.deferred, *(i for dot in group.dots for i in (dot.index, *dot.casts))]
            self._deferred |= dict.fromkeys(later, group.ready_position + 1)

    def place(self, match: Match) -> PlacedMatch | str:
        """Places a match among the accepted sites, or says why it cannot be."""
        if isinstance(match, GatherMatch):
            return self._place_gather(match)
        if self._taken(match.consumed):
            return "its matmul belongs to another site"
        return PlacedMatch(match, match.consumed, max(match.consumed))

    def _place_gather(self, match: GatherMatch) -> PlacedMatch | str:
        """Places a gather before the first use of its array.

        Its matmuls are those whose weights can be ready there.
        """
        position = min(self.graph.users(match.root))
        free = [dot for dot in match.dots if not self._taken({dot.index, *dot.casts})]
        makers = {dot.index: self._makers_after(dot.matmul.w, position) for dot in free}
        dots = [dot for dot in free if makers[dot.index] is not None]
        if not dots:
            if free:
                return "its weight is made after something else needs the gathered array"
            return "its matmul belongs to another site"
        wgrads = [dot for dot in match.wgrads if not self._taken({dot.index, *dot.casts})]
        consumed = consumed_by(self.graph, match.between, [*dots, *wgrads]).union(match.chain)
        if self._taken(consumed):
            return "another site moves it"
        root = match.root
        needs_root = root in self.graph.results or not consumed.issuperset(self.graph.users(root))
        if needs_root and not match.can_recover_root:
            return "the gathered array is also used elsewhere, in another dtype or layout"
        moved = {index for dot in dots for index in makers[dot.index] or ()}
        match = replace(match, dots=dots, wgrads=wgrads, needs_root=needs_root)
        immediate = [dot for dot in wgrads if self._makers_after(dot.matmul.w, position) == []]
        fixed = self._consumed | self._moved | self._needed | moved | consumed
        return PlacedMatch(
            match,
            consumed,
            position,
            tuple(sorted(moved)),
            tuple(group_immediate(self.graph, immediate)),
            tuple(group_wgrads(self.graph, [dot for dot in wgrads if dot not in immediate], fixed)),
        )

    def _taken(self, indices: Iterable[int]) -> bool:
        return any(
            index in taken
            for index in indices
            for taken in (self._consumed, self._moved, self._deferred)
        )

    def _makers_after(self, atom: Atom, position: int) -> list[int] | None:
        """The makers of `atom` from `position` on; None if they cannot be moved before it."""
        found: set[int] = set()
        waiting = variables([atom])
        while waiting:
            index = self.graph.producer(waiting.pop())
            if index is None or index in found:
                continue
            if self._deferred.get(index, 0) > position:
                return None
            if index < position:
                continue
            equation = self.graph.equations[index]
            # Moving a matmul would delay the gather, and it may belong to another site.
            if index in self._consumed or equation.primitive.name == "dot_general":
                return None
            if not is_pure(equation):
                return None
            found.add(index)
            waiting += variables(equation.invars)
        return sorted(found)


def consumed_by(
    graph: Graph, between: Sequence[int], dots: Sequence[GatheredDot]
) -> frozenset[int]:
    """Indices of the dots, and of equations between the root and them that have no other use."""
    consumed = {index for dot in dots for index in (dot.index, *dot.casts)}
    for index in reversed(between):
        (var,) = graph.equations[index].outvars
        if var not in graph.results and consumed.issuperset(graph.users(var)):
            consumed.add(index)
    return frozenset(consumed)
