"""Finds the matmuls that communicate over Explicit mesh axes, by the types of their arrays.

An array is gathered where a reshard, or the type of a dot's result, asks for a dimension whole that
a mesh axis shards. The dots that use it, also after equations that commute with the gather, become
one region. A dot that contracts a sharded dimension leaves each device a summand. What adds up and
transforms summands, up to a sharded or a replicated result, becomes one region as well. A region
whose dots have weights that a second axis shards gathers these itself, if its op can do so in its
own loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, reshard

from collective_matmul.dispatch.recording import record, record_decisions
from collective_matmul.jaxprs.dependencies import Dependencies, EquationGroup, spliced
from collective_matmul.jaxprs.graph import Atom, Graph, type_of, variables
from collective_matmul.jaxprs.sources import described
from collective_matmul.rewrite.find.commuting import back_through
from collective_matmul.rewrite.find.manual_regions import (
    ADDITIONS,
    ManualRegion,
    as_shard_map,
    commutes,
    gradients_end_the_process,
    sums_cannot_be_compiled,
)
from collective_matmul.rewrite.find.placements import (
    PARTIAL,
    dot_placement,
    explicit_axes,
    gathered_operand,
    is_local,
    may_communicate,
    other_axes_stay,
    placement,
    spec_of,
    sums,
    why_unclear,
    without_axes,
)
from collective_matmul.rewrite.find.report import FoundSite, is_ours, left_alone_by_type
from collective_matmul.rewrite.find.supported_collectives import CollectiveKind

#: Replaces the sites in a shard_map, and reports on them; the same object if it has none.
Rewrite = Callable[[JaxprEqn], tuple[JaxprEqn, list[FoundSite]]]
_SUMMED = "its matmul belongs to another site, which sums over devices"
_GRADIENTS = "XLA for CPUs cannot sum its gradients in 16 bits beside the axes that are left to it"
_NEEDED = "overlap needs a matmul there, as in reshard(x, P()) @ w"


class ExplicitGather(NamedTuple):
    """An array that is gathered over a mesh axis along one of its dimensions."""

    array: Var
    dimension: int
    axis: str


@dataclass(frozen=True)
class ExplicitWeight:
    """A weight of a dot that a mesh axis shards.

    Attributes:
      gather: its gather, or that of an array from which the weight is made.
      index: index of the equation that asks for the gather: a reshard, or the dot.
      between: indices of the equations from the reshard to the dot; none if the dot asks.
    """

    gather: ExplicitGather
    index: int
    between: tuple[int, ...] = ()


def with_regions(graph: Graph, rewrite: Rewrite) -> tuple[Graph, list[FoundSite]]:
    """A jaxpr with its regions replaced; the same object if there are none.

    Args:
      graph: the jaxpr.
      rewrite: replaces the sites of a region.

    Returns:
      The jaxpr, and what was found, in the order of the program.
    """
    prepared = _gathered_once(graph)
    regions = _Regions(prepared, rewrite)
    result = regions.rewritten()
    found = sorted(regions.found, key=lambda item: item[0])
    return graph if result is prepared else result, [site for _, site in found]


def _gathers_of(equation: JaxprEqn) -> Iterator[tuple[int, ExplicitGather]]:
    """The operands of an equation that are gathered for it, by their places."""
    for axis in explicit_axes(equation):
        side = gathered_operand(equation, axis)
        array = None if side is None else equation.invars[side]
        if side is not None and isinstance(array, Var):
            dimension = placement(array, axis)
            assert isinstance(dimension, int)
            yield side, ExplicitGather(array, dimension, axis)


class _Regions:
    """The regions of one jaxpr that are replaced.

    Attributes:
      found: what was found, with the index of the equation that communicates.
    """

    def __init__(self, graph: Graph, rewrite: Rewrite):
        self.graph = graph
        self.found: list[tuple[int, FoundSite]] = []
        self._rewrite = rewrite
        self._taken: set[int] = set()
        self._dependencies = Dependencies(graph)
        self._made: list[tuple[int, list[JaxprEqn]]] = []
        #: Equations of regions that are sites, but stay as they are.
        self._kept: set[int] = set()
        #: Equations that regions have copied, and the weights that ops gather.
        self._copied: set[int] = set()
        self._weights: set[ExplicitGather] = set()
        self._whole_weights: set[ExplicitGather] = set()
        self._asking_weights: set[tuple[int, str]] = set()

    def rewritten(self) -> Graph:
        """The jaxpr with its regions replaced; the same object if there are none."""
        equations = self.graph.equations
        asking = {
            index: [*explicit_axes(equation)]
            for index, equation in enumerate(equations)
            if may_communicate(equation) and not is_ours(equation)
        }
        gathers = dict.fromkeys(g for index in asking for _, g in _gathers_of(equations[index]))
        axes = dict.fromkeys(axis for each in asking.values() for axis in each)
        for gather in gathers:
            self._gather_with_weights(gather)
        for axis in axes:
            self._sums(axis, asking.keys(), self._accept_with_weights)
        # Arrays before their weights.
        for gather in sorted(gathers, key=self._weights.__contains__):
            self._gather(gather)
        for axis in axes:
            self._sums(axis, asking.keys(), self._accept)
        for index, named in asking.items():
            for axis in named if index not in self._taken else ():
                reason = why_unclear(equations[index], axis)
                if reason and (index, axis) not in self._asking_weights:
                    self._left_alone(index, equations[index].invars[0], axis, reason)
        if not self._made:
            return self.graph
        gone = self._taken | self._unused()
        kept = ((index, each) for index, each in enumerate(equations) if index not in gone)
        return Graph(spliced(self.graph.jaxpr, kept, self._made))

    def _accept(self, region: ManualRegion) -> bool:
        """Replaces a region, if that gives it a site."""
        equation = as_shard_map(self.graph, region)
        if isinstance(equation, str):
            array = self.graph.equations[region.anchor].invars[0]
            kind = region.kind(self.graph)
            self._left_alone(region.anchor, array, min(region.axes), equation, kind)
            return False
        if gradients_end_the_process(equation):
            with record_decisions(hidden=True):
                new, found = equation, self._rewrite(equation)[1]
            found = [
                replace(site, kept=True, reason=_GRADIENTS) if site.replaced else site
                for site in found
            ]
        else:
            new, found = self._rewrite(equation)
        self.found += [(region.anchor, site) for site in found]
        if new is equation:
            self._kept |= region.replaced if any(site.kept for site in found) else set()
            return False
        self._take(region, new)
        return True

    def _accept_with_weights(self, region: ManualRegion) -> bool:
        """Replaces a region with the gathers of its weights, if its op executes all of them.

        Else the region without these gathers, if they are possible in the op.
        """
        found = _with_weights(self.graph, region)
        if found is None or not self._dependencies.allows(self._group(found[0])):
            return False
        whole_region, weights = found
        equation = as_shard_map(self.graph, whole_region)
        if isinstance(equation, str) or gradients_end_the_process(equation):
            return False
        with record_decisions(hidden=True) as decisions:
            new, sites = self._rewrite(equation)
        axes = (weights[0].gather.axis,)
        gathers = [s for s in sites if s.kind == "all_gather" and s.axes == axes and s.replaced]
        if len(gathers) != len(weights) or sums_cannot_be_compiled(new):
            return False
        self._weights |= {weight.gather for weight in weights}
        self._asking_weights |= {(weight.index, weight.gather.axis) for weight in weights}
        self.found += [(w.index, site) for w, site in zip(weights, gathers, strict=True)]
        if any(site.kept for site in gathers):
            # The compiler gathers them once for all their matmuls. Sites are the same.
            self._whole_weights |= {weight.gather for weight in weights}
            return self._accept(region)
        for decision in decisions:
            record(decision)
        self.found += [(region.anchor, site) for site in sites if site not in gathers]
        self._take(whole_region, new)
        return True

    def _take(self, region: ManualRegion, equation: JaxprEqn) -> None:
        self._taken |= region.replaced
        self._copied |= region.copied
        self._dependencies.add(self._group(region))
        self._made.append((max(region.replaced), [equation]))

    def _unused(self) -> set[int]:
        """Gathers of weights that only regions need, which have their own."""
        read = {var for _, made in self._made for each in made for var in variables(each.invars)}
        return self.graph.unneeded(self._copied, self._taken, read)

    def _left_alone(
        self, index: int, array: Atom, axis: str, reason: str, kind: CollectiveKind = "all_gather"
    ) -> None:
        site = left_alone_by_type(self.graph.equations[index], kind, array, axis, reason)
        self.found.append((index, site))

    def _group(self, region: ManualRegion) -> EquationGroup:
        return EquationGroup(region.replaced, tuple(region.inputs(self.graph)))

    def _gather_with_weights(self, gather: ExplicitGather) -> None:
        """Replaces dots that one gather feeds and whose weights another axis shards."""
        dots, _ = self._dots_of(gather)
        weights = {dot: _weight_of(self.graph, dot, gather.axis) for dot in dots}
        for axis in {weight.gather.axis for weight in weights.values() if weight is not None}:
            alike = {
                d: dots[d] for d, w in weights.items() if w is not None and w.gather.axis == axis
            }
            region = self._joined(gather, alike)
            if region is not None:
                self._accept_with_weights(region)

    def _gather(self, gather: ExplicitGather) -> None:
        """Replaces the dots that one gather feeds, in as many regions as it takes."""
        found, reasons = self._dots_of(gather)
        decided = self._taken | self._kept
        waiting = {dot: path for dot, path in found.items() if dot not in decided}
        known = not self._kept.isdisjoint(found) or gather in self._whole_weights
        while waiting and (region := self._joined(gather, waiting)) is not None:
            known = True  # The reasons are, if it is refused.
            if self._accept(region):
                # Others that need what it gathered by a reshard have it from there.
                waiting = {d: path for d, path in waiting.items() if self._taken.isdisjoint(path)}
            waiting = {d: path for d, path in waiting.items() if d not in region.equations}
        if known:
            return
        if found:
            reasons.append("its matmul belongs to another site")
        unused = self._unused()
        for index in [user for user in self._users_of(gather) if user not in unused][:1]:
            reason = " and ".join(dict.fromkeys(reasons))
            self._left_alone(index, gather.array, gather.axis, reason)

    def _joined(
        self, gather: ExplicitGather, dots: dict[int, frozenset[int]]
    ) -> ManualRegion | None:
        """The first of the dots, with those of the others that can be executed together with it."""
        array, dimension, axis = gather
        region = None
        for dot, path in sorted(dots.items()):
            before = () if region is None else region.equations
            equations = tuple(sorted({dot}.union(path, before)))
            anchor = min(index for index in equations if index in self.graph.users(array))
            more = ManualRegion(frozenset({axis}), anchor, equations, {array: (axis, dimension)})
            if self._dependencies.allows(self._group(more)):
                region = more
        return region

    def _users_of(self, gather: ExplicitGather) -> list[int]:
        """Indices of the equations that gather an array."""
        return [
            index
            for index in self.graph.users(gather.array)
            if index not in self._taken
            and not is_ours(equation := self.graph.equations[index])
            and gather in (each for _, each in _gathers_of(equation))
        ]

    def _is_summed(self, equation: JaxprEqn, var: Var, dimension: int | None, axis: str) -> bool:
        """Whether a dot's result is summed over another axis, and the dot is left to that sum.

        Not where it contracts the gathered dimension, as gradients of weights do.
        """
        contracted, _ = equation.params["dimension_numbers"]
        side = 0 if equation.invars[0] is var else 1
        if dimension is None or dimension in contracted[side]:
            return False
        return any(sums(equation, other) for other in explicit_axes(equation) if other != axis)

    def _dots_of(self, gather: ExplicitGather) -> tuple[dict[int, frozenset[int]], list[str]]:
        """The dots that use a gathered array, each with the equations before it, and other uses."""
        array, dimension, axis = gather
        dots: dict[int, frozenset[int]] = {}
        reasons: list[str] = []

        def follow(index: int, path: frozenset[int], dimension: int | None) -> None:
            """Adds the dots that use the result of equation `index`, or why others do not fit."""
            (var,), path = self.graph.equations[index].outvars, path | {index}
            if var in self.graph.results:
                reasons.append(
                    f"the gathered array is a result of the function around it; {_NEEDED}"
                )
            for user in self.graph.users(var):
                equation = self.graph.equations[user]
                if equation.primitive.name == "dot_general":
                    places = [placement(atom, axis) for atom in equation.invars]
                    if self._is_summed(equation, var, dimension, axis):
                        reasons.append(_SUMMED)
                    elif dot_placement(equation, *places) == placement(equation.outvars[0], axis):
                        dots[user] = dots.get(user, frozenset()) | path
                    else:
                        reasons.append(f"its matmul communicates by itself ({described(equation)})")
                elif (op := commutes(self.graph, equation)) is None or op.operand is not var:
                    reasons.append(f"{described(equation)} uses the gathered array; {_NEEDED}")
                elif not is_local(equation, axis):
                    reasons.append(f"{described(equation)} shards its result over {axis!r} again")
                else:
                    devices = type_of(var).sharding.mesh.shape[axis]
                    after = None if dimension is None else op.dimension(dimension, devices)
                    follow(user, path, after)

        for index in self._users_of(gather):
            equation = self.graph.equations[index]
            if equation.primitive.name == "dot_general":
                if equation.invars[0] is equation.invars[1]:
                    reasons.append("the gathered array is multiplied by itself")
                elif self._is_summed(equation, array, dimension, axis):
                    reasons.append(_SUMMED)
                else:
                    dots[index] = frozenset()
            elif other_axes_stay(equation.invars[0], equation.outvars[0], axis):
                follow(index, frozenset(), dimension)
            else:
                reasons.append(f"{described(equation)} changes several mesh axes at once")
        return dots, reasons

    def _sums(self, axis: str, asking: Set[int], accept: Callable[[ManualRegion], bool]) -> None:
        """Replaces dots that contract what the axis shards, with the sums over devices.

        Args:
          axis: the mesh axis.
          asking: indices of dots and reshards of sharded arrays.
          accept: replaces a region, or returns False.
        """
        trees = self._summands(axis, asking)
        ends = [i for i in trees if self.graph.only_user(self._made_by(i)) not in trees]
        for end in ends:
            *_, (index, _) = back_through(self.graph, self._made_by(end), commutes)
            self._sum(index, axis, trees[index], accept)

    def _made_by(self, index: int) -> Var:
        return self.graph.equations[index].outvars[0]

    def _summands(self, axis: str, asking: Set[int]) -> dict[int, tuple[int, ...]]:
        """The equations that make a summand of each device, by the one that completes it."""
        trees: dict[int, tuple[int, ...]] = {}
        for index, equation in enumerate(self.graph.equations):
            if index in self._taken:
                continue
            if index in asking and sums(equation, axis):
                trees[index] = (index,)
                continue
            atoms = _summed_operands(self.graph, equation, axis)
            makers = [i for i in map(self.graph.producer, atoms) if i in trees]
            alone = all(self.graph.only_user(atom) is not None for atom in atoms)
            if makers and len(makers) == len(atoms) and alone:
                parts = {part for maker in makers for part in trees[maker]}
                trees[index] = (*sorted(parts), index)
        return trees

    def _sum(
        self,
        index: int,
        axis: str,
        tree: Sequence[int],
        accept: Callable[[ManualRegion], bool],
    ) -> None:
        """Replaces the sum whose last equation is `index`, or else its parts."""
        is_partial = placement(self._made_by(index), axis) == PARTIAL
        if is_partial or not self._kept.isdisjoint(tree):
            return
        region = ManualRegion(frozenset({axis}), index, tuple(tree), summed=axis)
        if self._dependencies.allows(self._group(region)) and accept(region):
            return
        for part in tree:
            if part != index and self.graph.equations[part].primitive.name == "dot_general":
                self._sum(part, axis, (part,), accept)


def _summed_operands(graph: Graph, equation: JaxprEqn, axis: str) -> list[Atom]:
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


def _weight_of(graph: Graph, dot: int, axis: str) -> ExplicitWeight | None:
    """The second operand of a dot, if it is gathered over another axis than `axis`.

    And if nothing but dots, as their second operand, needs it whole.
    """
    equation, between = graph.equations[dot], list[int]()
    for side, gather in _gathers_of(equation):
        if side == 1 and gather.axis != axis:
            return ExplicitWeight(gather, dot)
    for index, _ in back_through(graph, equation.invars[1], commutes):
        between.insert(0, index)
    index, *_ = (*between, dot)
    equation = graph.equations[index]
    if equation.primitive.name != "reshard" or not _is_weight(graph, index):
        return None
    for _, gather in _gathers_of(equation):
        stays = other_axes_stay(gather.array, equation.outvars[0], gather.axis)
        if gather.axis != axis and stays:
            return ExplicitWeight(gather, index, (*between,))
    return None


def _is_weight(graph: Graph, index: int) -> bool:
    """Whether only dots use the result of an equation, as their second operand."""
    (var,) = graph.equations[index].outvars
    if var in graph.results:
        return False
    for user in graph.users(var):
        equation = graph.equations[user]
        if equation.primitive.name == "dot_general":
            if equation.invars[0] is var:
                return False
        elif commutes(graph, equation) is None or not _is_weight(graph, user):
            return False
    return True


def _with_weights(
    graph: Graph, region: ManualRegion
) -> tuple[ManualRegion, list[ExplicitWeight]] | None:
    """A region with the gathers of the weights of all its dots, over one further axis.

    Returns:
      The region, and the weights in the order of the program; None if there are none such.
    """
    (axis,) = region.axes
    equations = graph.equations
    if region.summed and placement(equations[region.equations[-1]].outvars[0], axis) is None:
        return None  # Nothing of an all-reduce is divided into chunks.
    dots = [i for i in region.equations if equations[i].primitive.name == "dot_general"]
    found = [_weight_of(graph, dot, axis) for dot in dots]
    weights = {weight.gather.array: weight for weight in found if weight is not None}
    axes = {weight.gather.axis for weight in weights.values()}
    if None in found or len(axes) != 1:
        return None
    (other,) = axes
    whole = {equations[dot].invars[1] for dot in dots}
    copied = frozenset(i for weight in weights.values() for i in weight.between)
    all_equations = tuple(sorted(copied.union(region.equations)))
    gathers_alone = all(
        atom not in region.gathered and gathered_operand(equations[index], other) == side
        for index in all_equations
        for side, atom in enumerate(equations[index].invars)
        if isinstance(atom, Var) and atom in weights
    )
    asking = {weight.index for weight in weights.values()}
    local = all(is_local(equations[index], other, whole) for index in region.equations)
    local &= all(is_local(equations[index], axis) for index in copied)
    local &= all(is_local(equations[index], other) for index in copied - asking)
    if not gathers_alone or not local:
        return None
    gathered = {
        weight.gather.array: (other, weight.gather.dimension) for weight in weights.values()
    }
    extended = replace(
        region,
        axes=region.axes | axes,
        equations=all_equations,
        gathered={**region.gathered, **gathered},
        copied=copied,
    )
    return extended, sorted(weights.values(), key=lambda weight: weight.index)


def _gathered_once(graph: Graph) -> Graph:
    """The jaxpr, in which dots share the gathers that their types ask for.

    It is the same object if nothing changes. A region that gathers weights holds none of the
    gradients of weights, which are sums over the weights' axis. These get an array that both need
    from a reshard before them.
    """
    dots: dict[tuple[Var, str], list[int]] = defaultdict(list)
    for index, equation in enumerate(graph.equations):
        if equation.primitive.name == "dot_general":
            for _, gather in _gathers_of(equation):
                dots[gather.array, gather.axis].append(index)
    equations = list(graph.equations)
    before: dict[int, list[JaxprEqn]] = defaultdict(list)
    for (var, axis), users in dots.items():
        if len(users) > 1 and any(_weight_of(graph, user, axis) for user in users):
            gather = _reshard(graph, var, axis, users[0])
            before[users[0]].append(gather)
            for user in users:
                new = [gather.outvars[0] if a is var else a for a in equations[user].invars]
                equations[user] = equations[user].replace(invars=new)
    if not before:
        return graph
    result = [each for i, old in enumerate(equations) for each in (*before[i], old)]
    return Graph(graph.jaxpr.replace(eqns=result))


def _reshard(graph: Graph, var: Var, axis: str, index: int) -> JaxprEqn:
    """The gather of an array over an axis, before equation `index`."""
    sharding = NamedSharding(type_of(var).sharding.mesh, without_axes(spec_of(var), {axis}))
    program = jax.make_jaxpr(lambda array: reshard(array, sharding))(type_of(var))
    (equation,) = program.jaxpr.eqns
    outvars = [Var(type_of(equation.outvars[0]))]
    source = graph.equations[index].source_info
    return equation.replace(invars=[var], outvars=outvars, source_info=source)
