"""Which sites of one jaxpr are replaced, so that every value is still made before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from collective_matmul.rewrite.einsum_matches import EinsumMatch
from collective_matmul.rewrite.gathers import GatherMatch, Use
from collective_matmul.rewrite.graph import Atom, Graph, is_pure, variables
from collective_matmul.rewrite.grouped_wgrad import Launch, beside, launches_of
from collective_matmul.rewrite.sums import SumMatch

Match = GatherMatch | SumMatch | EinsumMatch


@dataclass(frozen=True)
class Placed:
    """A match that can be carried out.

    Attributes:
      consumed: indices of the equations that it replaces.
      position: it comes before the equation of this index.
      moved: equations behind the position that have to come before it, in order.
      beside: weight gradients that are computed with it.
      launches: those that are computed later.
    """

    match: Match
    consumed: frozenset[int]
    position: int
    moved: tuple[int, ...] = ()
    beside: tuple[Launch, ...] = ()
    launches: tuple[Launch, ...] = ()


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
        #: Equations that sites need where these are placed.
        self._needed: set[int] = set()
        #: What a launch puts off, and the equation before which that comes.
        self._put_off: dict[int, int] = {}

    def accept(self, placed: Placed) -> None:
        """Takes the equations of a site, so that no other has them."""
        self.placed.append(placed)
        self._consumed |= placed.consumed
        self._moved |= set(placed.moved)
        atoms = [atom for index in placed.moved for atom in self.graph.equations[index].invars]
        if isinstance(placed.match, GatherMatch):
            atoms += [use.matmul.w for use in placed.match.uses]
        atoms += [use.matmul.w for launch in placed.beside for use in launch.uses]
        makers = map(self.graph.producer, atoms)
        self._needed.update(index for index in makers if index is not None)
        for launch in placed.launches:
            later = [*launch.put_off, *(i for use in launch.uses for i in (use.index, *use.casts))]
            self._put_off |= dict.fromkeys(later, launch.ready + 1)

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
        consumed = consumed_by(self.graph, match.between, [*uses, *later]).union(match.chain)
        if self._taken(consumed):
            return "another site moves it"
        root = match.root
        keeps = root in self.graph.results or not consumed.issuperset(self.graph.users(root))
        if keeps and not match.can_keep:
            return "what is gathered is also used elsewhere, in another dtype or layout"
        moved = {index for use in uses for index in late[use.index] or ()}
        match = replace(match, uses=uses, later=later, keeps_root=keeps)
        now = [use for use in later if self._late(use.matmul.w, position) == []]
        fixed = self._consumed | self._moved | self._needed | moved | consumed
        return Placed(
            match,
            consumed,
            position,
            tuple(sorted(moved)),
            tuple(beside(self.graph, now)),
            tuple(launches_of(self.graph, [use for use in later if use not in now], fixed)),
        )

    def _taken(self, indices: Iterable[int]) -> bool:
        return any(
            index in taken
            for index in indices
            for taken in (self._consumed, self._moved, self._put_off)
        )

    def _late(self, atom: Atom, position: int) -> list[int] | None:
        """The equations that make an atom but not before `position`; None if they cannot."""
        found: set[int] = set()
        waiting = variables([atom])
        while waiting:
            index = self.graph.producer(waiting.pop())
            if index is None or index in found:
                continue
            if self._put_off.get(index, 0) > position:
                return None
            if index < position:
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


def consumed_by(graph: Graph, between: Sequence[int], uses: Sequence[Use]) -> frozenset[int]:
    """The matmuls, and what lies between them and what was gathered and serves nothing else."""
    consumed = {index for use in uses for index in (use.index, *use.casts)}
    for index in reversed(between):
        (var,) = graph.equations[index].outvars
        if var not in graph.results and consumed.issuperset(graph.users(var)):
            consumed.add(index)
    return frozenset(consumed)
