"""Selects the sites of one jaxpr to replace, so that values are still made before their uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.bodies import jaxprs_of
from collective_matmul.jaxprs.dependencies import Dependencies, EquationGroup
from collective_matmul.jaxprs.graph import Atom, Graph, is_pure, variables
from collective_matmul.jaxprs.walks import all_equations
from collective_matmul.rewrite.find.commuting import has_no_gradient
from collective_matmul.rewrite.find.report import is_ours
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch
from collective_matmul.rewrite.match.gathers import GatheredDot, GatherMatch
from collective_matmul.rewrite.match.grouped_wgrad import (
    GroupedWgrad,
    group_immediate,
    group_wgrads,
)
from collective_matmul.rewrite.match.sums import SumMatch
from collective_matmul.rewrite.match.weight_gathers import GatheredWeight

Match = GatherMatch | SumMatch | EinsumMatch

_CYCLE = "the other operand of its matmul is computed from the gathered array"


@dataclass(frozen=True)
class PlacedMatch:
    """A match with the position of its replacement.

    Attributes:
      match: the match.
      consumed: indices of the equations that it replaces.
      position: index of the equation before which the replacement is inserted, or after it as soon
        as its operands are available.
      groups: the consumed equations, by the replacements that execute them.
      immediate_wgrads: weight gradients that are computed with the gather.
      later_wgrads: weight gradients that are computed later.
      weights: the gathers of its weights, if the op executes them too.
      frozen: whether none of its weights has a gradient.
    """

    match: Match
    consumed: frozenset[int]
    position: int
    groups: tuple[EquationGroup, ...] = ()
    immediate_wgrads: tuple[GroupedWgrad, ...] = ()
    later_wgrads: tuple[GroupedWgrad, ...] = ()
    weights: tuple[GatheredWeight, ...] = ()
    frozen: bool = False

    @property
    def keeps_gathered(self) -> bool:
        """Whether others than the products of its op use what it gathers."""
        needs_root = isinstance(self.match, GatherMatch) and self.match.needs_root
        return needs_root or bool(self.immediate_wgrads or self.later_wgrads)


class SiteSelection:
    """The sites of one jaxpr that are to be replaced.

    Attributes:
      graph: dataflow of the jaxpr.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._consumed: set[int] = set()
        self._dependencies = Dependencies(graph)

    @property
    def consumed(self) -> Set[int]:
        """Indices of the equations that the accepted sites replace."""
        return self._consumed

    def accept(self, placed: PlacedMatch) -> None:
        """Accepts a site. No other site may consume its equations."""
        self._consumed |= placed.consumed
        for group in placed.groups:
            self._dependencies.add(group)

    def place(self, match: Match) -> PlacedMatch | str:
        """Places a match among the accepted sites, or says why it cannot be."""
        if isinstance(match, GatherMatch):
            return self._place_gather(match)
        if not self._consumed.isdisjoint(match.consumed):
            return "its matmul belongs to another site"
        group = EquationGroup(match.consumed, self._inputs(match))
        if not self._dependencies.allows(group):
            return "its operands are computed by another site that needs its result"
        terms = match.terms if isinstance(match, SumMatch) else ()
        frozen = bool(terms) and all(has_no_gradient(self.graph, term.w) for term in terms)
        position = max(match.consumed)
        return PlacedMatch(match, match.consumed, position, (group,), frozen=frozen)

    def _place_gather(self, match: GatherMatch) -> PlacedMatch | str:
        """Places a gather before the first use of its array.

        Its matmuls are those whose weights can be ready there.
        """
        free = [dot for dot in match.dots if self._is_free(dot)]
        if not free:
            return "its matmul belongs to another site"
        position = min(self.graph.users(match.root))
        early = [dot for dot in free if self._makers_after(dot.matmul.w, position) is not None]
        alone = EquationGroup(frozenset(match.chain), self._inputs(match))
        gather = self._joined(alone, early)
        dots = [dot for dot in early if dot.index in gather.equations]
        if not dots:
            return _CYCLE if early else "its weight is made after the gathered array is used"
        wgrads = [dot for dot in match.wgrads if self._is_free(dot)]
        ready = [dot for dot in wgrads if self._makers_after(dot.matmul.w, position) == []]
        gather = self._joined(gather, ready)
        immediate = [dot for dot in ready if dot.index in gather.equations]
        later = [dot for dot in wgrads if dot not in immediate]
        inputs = variables([*gather.inputs, *(dot.matmul.w for dot in later)])
        consumed = consumed_by(self.graph, match.between, [*dots, *wgrads], inputs)
        consumed = consumed.union(match.chain)
        root, users = match.root, self.graph.users(match.root)
        used = root in inputs or root in self.graph.results
        needs_root = used or not consumed.issuperset(users)
        if needs_root and not match.can_recover_root:
            return "the gathered array is also used elsewhere, in another dtype or layout"
        fixed = self._consumed | consumed
        launches = self._launches(gather, group_wgrads(self.graph, later, fixed), root)
        return PlacedMatch(
            replace(match, dots=dots, wgrads=wgrads, needs_root=needs_root),
            consumed,
            position,
            (gather, *launches.values()),
            tuple(group_immediate(self.graph, immediate)),
            tuple(launches),
            frozen=all(has_no_gradient(self.graph, dot.matmul.w) for dot in dots),
        )

    def _inputs(self, match: Match) -> tuple[Atom, ...]:
        """The values that the replacement of a match reads; of a gather, without its weights."""
        if isinstance(match, SumMatch):
            return tuple(atom for term in match.terms for atom in (term.x, term.w))
        if match.collective.kind == "all_gather":
            (shard,) = self.graph.equations[match.index].invars
            return (shard,) if isinstance(match, GatherMatch) else (shard, match.operands[1])
        assert isinstance(match, EinsumMatch)
        return match.operands

    def _is_free(self, dot: GatheredDot) -> bool:
        return dot.index not in self._consumed

    def _joined(self, group: EquationGroup, dots: Sequence[GatheredDot]) -> EquationGroup:
        """The group with those of the dots that can be executed together with it."""
        for dot in dots:
            more = _with_dots(group, [dot])
            if self._dependencies.allows(more):
                group = more
        return group

    def _launches(
        self, gather: EquationGroup, wgrads: Sequence[GroupedWgrad], root: Atom
    ) -> dict[GroupedWgrad, EquationGroup]:
        """The launches, divided where an operand depends on another product of its launch."""
        dependencies = self._dependencies.copy()
        dependencies.add(gather)
        start = EquationGroup(frozenset(), (root,))
        found: dict[GroupedWgrad, EquationGroup] = {}
        for launch in wgrads:
            parts = [launch]
            if not dependencies.allows(_with_dots(start, launch.dots)):
                parts = [replace(launch, dots=(dot,)) for dot in reversed(launch.dots)]
            for part in parts:
                found[part] = _with_dots(start, part.dots)
                dependencies.add(found[part])
        return found

    def _makers_after(self, atom: Atom, position: int) -> list[int] | None:
        """The makers of `atom` from `position` on; None if the gather must not wait for them."""
        found: set[int] = set()
        waiting = variables([atom])
        while waiting:
            index = self.graph.producer(waiting.pop())
            if index is None or index in found or index < position:
                continue
            equation = self.graph.equations[index]
            # Waiting for a matmul would delay the gather.
            if index in self._consumed or _multiplies(equation) or not is_pure(equation):
                return None
            found.add(index)
            waiting += variables(equation.invars)
        return sorted(found)


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether it is a matmul, a call that holds one, or part of an op."""
    if equation.primitive.name == "dot_general" or is_ours(equation):
        return True
    return any(map(_multiplies, all_equations(*jaxprs_of(equation))))


def _with_dots(group: EquationGroup, dots: Sequence[GatheredDot]) -> EquationGroup:
    equations = group.equations.union(dot.index for dot in dots)
    return EquationGroup(equations, (*group.inputs, *(dot.matmul.w for dot in dots)))


def consumed_by(
    graph: Graph,
    between: Sequence[int],
    dots: Sequence[GatheredDot],
    needed: Collection[Var],
) -> frozenset[int]:
    """Indices of the dots, and of equations between the root and them that have no other use.

    Args:
      graph: dataflow of the jaxpr.
      between: indices of the equations between the root and the dots, each after its producers.
      dots: the dots.
      needed: variables that the replacement reads.
    """
    consumed = {dot.index for dot in dots}
    for index in reversed(between):
        (var,) = graph.equations[index].outvars
        used = var in graph.results or var in needed
        if not used and consumed.issuperset(graph.users(var)):
            consumed.add(index)
    return frozenset(consumed)
