"""Which sites of one jaxpr are replaced, so that every value is still made before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from collective_matmul.rewrite.einsums import EinsumMatch
from collective_matmul.rewrite.gathers import GatherMatch, Use
from collective_matmul.rewrite.graph import Atom, Graph, is_pure, variables
from collective_matmul.rewrite.sums import SumMatch

Match = GatherMatch | SumMatch | EinsumMatch


@dataclass(frozen=True)
class Placed:
    """A match that can be carried out.

    Attributes:
      consumed: indices of the equations that it replaces.
      position: it comes before the equation of this index.
      moved: equations behind the position that have to come before it, in order.
    """

    match: Match
    consumed: frozenset[int]
    position: int
    moved: tuple[int, ...] = ()


class Plan:
    """The sites of one jaxpr that are to be replaced.

    Attributes:
      graph: of the jaxpr.
      placed: the sites accepted.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.placed: list[Placed] = []
        self._consumed: set[int] = set()
        self._moved: set[int] = set()

    def accept(self, placed: Placed) -> None:
        """Takes the equations of a site, so that no other has them."""
        self.placed.append(placed)
        self._consumed |= placed.consumed
        self._moved |= set(placed.moved)

    def place(self, match: Match) -> Placed | str:
        """Where a match can be carried out beside those accepted, or why it cannot."""
        if isinstance(match, GatherMatch):
            return self._place_gather(match)
        if self._taken(match.consumed):
            return "its matmul belongs to another site"
        return Placed(match, match.consumed, max(match.consumed))

    def _place_gather(self, match: GatherMatch) -> Placed | str:
        """Before anything uses what is gathered, with the weights that can be there."""
        position = min(self.graph.users(match.root))
        free = [use for use in match.uses if not self._taken({use.index, *use.casts})]
        late = {use.index: self._late(use.matmul.w, position) for use in free}
        uses = [use for use in free if late[use.index] is not None]
        if not uses:
            if free:
                return "its weight is made after something else needs what is gathered"
            return "its matmul belongs to another site"
        later = [use for use in match.later if not self._taken({use.index, *use.casts})]
        consumed = self._consumed_by(match, [*uses, *later])
        if self._taken(consumed):
            return "another site moves it"
        root = match.root
        keeps = root in self.graph.results or not consumed.issuperset(self.graph.users(root))
        if keeps and not match.can_keep:
            return "what is gathered is also used elsewhere, in another dtype or layout"
        moved = {index for use in uses for index in late[use.index] or ()}
        match = replace(match, uses=uses, later=later, keeps_root=keeps)
        return Placed(match, consumed, position, tuple(sorted(moved)))

    def _taken(self, indices: Iterable[int]) -> bool:
        return any(index in self._consumed or index in self._moved for index in indices)

    def _late(self, atom: Atom, position: int) -> list[int] | None:
        """The equations from `position` on that make an atom; None if they cannot come before."""
        found: set[int] = set()
        waiting = variables([atom])
        while waiting:
            index = self.graph.producer(waiting.pop())
            if index is None or index < position or index in found:
                continue
            equation = self.graph.equations[index]
            # A matmul takes time where it stands, and may be another site's.
            if index in self._consumed or equation.primitive.name == "dot_general":
                return None
            if not is_pure(equation):
                return None
            found.add(index)
            waiting += variables(equation.invars)
        return sorted(found)

    def _consumed_by(self, match: GatherMatch, uses: Sequence[Use]) -> frozenset[int]:
        """The gather, the matmuls, and what lies between and serves nothing else."""
        graph = self.graph
        consumed = {index for use in uses for index in (use.index, *use.casts)}
        for index in reversed(match.between):
            (var,) = graph.equations[index].outvars
            if var not in graph.results and consumed.issuperset(graph.users(var)):
                consumed.add(index)
        return frozenset(consumed.union(match.chain))
