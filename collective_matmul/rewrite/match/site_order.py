"""Selects the sites of one jaxpr to replace, so that values are still made before their uses.

The weight gradients of one gathered array are grouped into kernel launches, and scheduled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from collective_matmul.jaxprs.bodies import executes_jaxprs, jaxprs_of
from collective_matmul.jaxprs.dependencies import Dependencies, EquationGroup
from collective_matmul.jaxprs.graph import Atom, Graph, is_pure, variables
from collective_matmul.jaxprs.walks import all_equations
from collective_matmul.rewrite.find.commuting import commuting_op, has_no_gradient
from collective_matmul.rewrite.find.report import is_ours
from collective_matmul.rewrite.find.supported_collectives import collective_of, kind_of
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch, match_einsum
from collective_matmul.rewrite.match.gathers import GatheredDot, GatherMatch, match_gather
from collective_matmul.rewrite.match.sums import SumMatch, match_sum
from collective_matmul.rewrite.match.weight_gathers import GatheredWeight

Match = GatherMatch | SumMatch | EinsumMatch


def match_at(
    graph: Graph, index: int, axis_sizes: Mapping[str, int], taken: Set[int] = frozenset()
) -> Match | str:
    """The match of the collective of equation `index`, or why there is none.

    Args:
      graph: dataflow of the jaxpr.
      index: index of an equation with a `kind_of`.
      axis_sizes: the manual axes around the jaxpr, with their sizes.
      taken: indices of the matmuls that it cannot have.
    """
    collective = collective_of(graph.equations[index], axis_sizes)
    if isinstance(collective, str):
        return collective
    if collective.kind == "all_gather":
        found = match_gather(graph, index, collective, taken)
    else:
        found = match_sum(graph, index, collective)
    if isinstance(found, str):
        return match_einsum(graph, index, collective) or found
    return found


_CYCLE = "the other operand of its matmul is computed from the gathered array"


@dataclass(frozen=True)
class GroupedWgrad:
    """Dots that contract the rows of one gathered array [*rows, K] with others [*rows, N].

    They are executed in one launch.

    Attributes:
      dots: the dots, the last in the program first: gradients are made in the reverse order of
        their weights. Exactly one unless `gathered_first`.
      gathered_first: whether the products are computed as [K, N], not [N, K].
      tied_sum: index of a sum over devices, or None. Neither its result nor the products are used
        before both are ready.
    """

    dots: tuple[GatheredDot, ...]
    gathered_first: bool
    tied_sum: int | None = None

    @property
    def position(self) -> int:
        """The index of the equation before which the launch is inserted."""
        return self.dots[0].index

    @property
    def ready_position(self) -> int:
        """The index of the equation before which the products are ready."""
        return self.position if self.tied_sum is None else self.tied_sum + 1


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
        group = EquationGroup(match.consumed, match.inputs)
        if not self._dependencies.allows(group):
            return "its operands are computed by another site that needs its result"
        position = max(match.consumed)
        return PlacedMatch(match, match.consumed, position, (group,), frozen=self._frozen(match))

    def _place_gather(self, match: GatherMatch) -> PlacedMatch | str:
        """Places a gather before the first use of its array.

        Its matmuls are those whose weights can be ready there.
        """
        free = [dot for dot in match.dots if self._is_free(dot)]
        if not free:
            return "its matmul belongs to another site"
        position = min(self.graph.users(match.root))
        early = [dot for dot in free if self._makers_after(dot.matmul.w, position) is not None]
        alone = EquationGroup(frozenset(match.chain), match.inputs)
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
        multiplied = {dot.index for dot in (*dots, *wgrads)}
        unneeded = self.graph.unneeded(match.between, multiplied, inputs)
        consumed = frozenset(multiplied).union(unneeded, match.chain)
        root, users = match.root, self.graph.users(match.root)
        used = root in inputs or root in self.graph.results
        needs_root = used or not consumed.issuperset(users)
        if needs_root and not match.can_recover_root:
            return "the gathered array is also used elsewhere, in another dtype or layout"
        fixed = self._consumed | consumed
        launches = self._launches(gather, group_wgrads(self.graph, later, fixed), root)
        match = replace(match, dots=dots, wgrads=wgrads, needs_root=needs_root)
        return PlacedMatch(
            match,
            consumed,
            position,
            (gather, *launches.values()),
            tuple(group_immediate(self.graph, immediate)),
            tuple(launches),
            frozen=self._frozen(match),
        )

    def _frozen(self, match: Match) -> bool:
        """Whether none of the weights of a match has a gradient."""
        return bool(match.terms) and all(has_no_gradient(self.graph, m.w) for m in match.terms)

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


def group_wgrads(
    graph: Graph, dots: Sequence[GatheredDot], fixed: Collection[int]
) -> list[GroupedWgrad]:
    """Groups the dots. Each is executed as early as possible, or later if that joins two groups.

    Args:
      graph: dataflow of the jaxpr.
      dots: dots that contract the rows of one array.
      fixed: indices of the equations that must not be deferred.
    """
    later_wgrads: list[GroupedWgrad] = []
    for dot in sorted(dots, key=lambda dot: dot.index):
        group = GroupedWgrad((dot,), _gathered_first(graph, dot))
        if later_wgrads and later_wgrads[-1].gathered_first and group.gathered_first:
            joined = _joined(graph, later_wgrads[-1], dot, fixed)
            if joined is not None:
                later_wgrads[-1] = joined
                continue
        later_wgrads.append(group)
    return later_wgrads


def group_immediate(graph: Graph, dots: Sequence[GatheredDot]) -> list[GroupedWgrad]:
    """Groups dots whose other operands are all available at once."""
    firsts = tuple(dot for dot in reversed(dots) if _gathered_first(graph, dot))
    others = [GroupedWgrad((dot,), False) for dot in dots if dot not in firsts]
    return [GroupedWgrad(firsts, True), *others] if firsts else others


def tie_to_sum(graph: Graph, group: GroupedWgrad) -> GroupedWgrad:
    """Ties the group to the sum over devices of products of the same operands, if there is one.

    These are the gradients of one gather's matmuls, and the ops tie them for the same reason:
    nothing waits for weight gradients, so XLA would defer them and keep their operands in memory
    until then.
    """
    for index in graph.users(group.dots[0].matmul.w):
        summed = _sum_of(graph, index)
        if summed is None or summed < group.position:
            continue
        if _can_wait_for(graph, group.dots, summed, ()):
            return replace(group, tied_sum=summed)
    return group


def _sum_of(graph: Graph, index: int) -> int | None:
    """The index of the sum over devices that is the only use of a dot; None if there is none."""
    equation = graph.equations[index]
    if equation.primitive.name != "dot_general":
        return None
    while (user := graph.only_user(equation.outvars[0])) is not None:
        equation = graph.equations[user]
        if kind_of(equation) == "reduce_scatter":
            return user
        added = equation.primitive.name in ("add", "add_any")
        if not added and commuting_op(graph, equation) is None:
            return None
    return None


def _joined(
    graph: Graph, group: GroupedWgrad, dot: GatheredDot, fixed: Collection[int]
) -> GroupedWgrad | None:
    """The group with one more dot; None if users of its products cannot wait for that dot."""
    if not _can_wait_for(graph, group.dots, dot.index, fixed):
        return None
    return GroupedWgrad((dot, *group.dots), True)


def _can_wait_for(
    graph: Graph, dots: Sequence[GatheredDot], last: int, fixed: Collection[int]
) -> bool:
    """Whether the equations before `last` that use the products can wait until after it."""
    made = {dot.result for dot in dots}
    consumed = {dot.index for dot in dots}
    for index in range(dots[-1].index + 1, last + 1):
        equation = graph.equations[index]
        if index in consumed or made.isdisjoint(variables(equation.invars)):
            continue
        if index == last or index in fixed or not _can_wait(graph, index):
            return False
        made.update(equation.outvars)
    return True


def _can_wait(graph: Graph, index: int) -> bool:
    """Whether the equation is cheap and not part of a site."""
    equation = graph.equations[index]
    if equation.primitive.name == "dot_general" or kind_of(equation) is not None:
        return False
    return is_pure(equation) and not executes_jaxprs(equation)


def _gathered_first(graph: Graph, dot: GatheredDot) -> bool:
    """Whether the result, once transposed, has the gathered array's columns first.

    A transpose after the dot in the program then cancels with the transpose of the product.
    """
    matmul, first = dot.matmul, 0
    user = graph.only_user(dot.result)
    if user is not None and graph.equations[user].primitive.name == "transpose":
        first = graph.equations[user].params["permutation"][0]
    if matmul.x_side == 0:
        return first < len(matmul.free)
    return first >= len(matmul.w_free)
