"""Finds the matmuls that communicate over Explicit mesh axes, by the types of their arrays.

An array is gathered where a reshard, or the type of a dot's result, asks for a dimension whole that
a mesh axis shards. The dots that use it, also after equations that commute with the gather, become
one region. A dot that contracts a sharded dimension leaves each device a summand. What adds up and
transforms summands, up to a sharded or a replicated result, becomes one region as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from jax.extend.core import JaxprEqn, Var

from collective_matmul.dispatch.recording import record, record_decisions
from collective_matmul.jaxprs.dependencies import Dependencies, EquationGroup, Scheduled, in_order
from collective_matmul.jaxprs.graph import Atom, Graph, type_of, variables
from collective_matmul.rewrite.find.collective_equations import CollectiveKind
from collective_matmul.rewrite.find.explicit_sums import summands
from collective_matmul.rewrite.find.explicit_weights import (
    ExplicitWeight,
    gathered_once,
    weight_of,
    with_weights,
)
from collective_matmul.rewrite.find.manual_regions import (
    ManualRegion,
    as_shard_map,
    commutes,
    gradients_end_the_process,
    other_axes_stay,
    sums_cannot_be_compiled,
)
from collective_matmul.rewrite.find.placements import (
    PARTIAL,
    dot_placement,
    explicit_axes,
    gathered_operand,
    is_local,
    may_communicate,
    placement,
    sums,
    why_unclear,
)
from collective_matmul.rewrite.find.report import (
    FoundSite,
    described,
    is_ours,
    left_alone_by_type,
)

#: Replaces the sites in a shard_map, and reports on them; the same object if it has none.
Rewrite = Callable[[JaxprEqn], tuple[JaxprEqn, list[FoundSite]]]
_SUMMED = "its matmul belongs to another site, which sums over devices"
_GRADIENTS = "XLA for CPUs cannot sum its gradients in 16 bits beside the axes that are left to it"
_NEEDED = "overlap needs a matmul there, as in reshard(x, P()) @ w"


def with_regions(graph: Graph, rewrite: Rewrite) -> tuple[Graph, list[tuple[JaxprEqn, FoundSite]]]:
    """A jaxpr with its regions replaced; the same object if there are none.

    Args:
      graph: the jaxpr.
      rewrite: replaces the sites of a region.

    Returns:
      The jaxpr, and what was found, in the order of the program: each with the equation that
      communicates.
    """
    prepared, equations = gathered_once(graph)
    regions = _Regions(prepared, rewrite)
    result = regions.rewritten()
    found = sorted(regions.found, key=lambda item: item[0])
    return graph if result is prepared else result, [(equations[i], site) for i, site in found]


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
        self._made: list[tuple[int, JaxprEqn]] = []
        #: Equations of regions that are sites, but stay as they are.
        self._kept: set[int] = set()
        #: Equations that regions have copied, and the weights that ops gather, with the axis.
        self._copied: set[int] = set()
        self._weights: set[tuple[Var, str]] = set()
        self._whole_weights: set[tuple[Var, str]] = set()
        self._asking_weights: set[tuple[int, str]] = set()

    def rewritten(self) -> Graph:
        """The jaxpr with its regions replaced; the same object if there are none."""
        equations = self.graph.equations
        asking = [
            (index, axis)
            for index, equation in enumerate(equations)
            if may_communicate(equation) and not is_ours(equation)
            for axis in explicit_axes(equation)
        ]
        gathers = [*dict.fromkeys(self._gathers(asking))]
        sums = {axis: {i for i, each in asking if each == axis} for _, axis in asking}
        for var, dimension, axis in gathers:
            self._gather_with_weights(var, dimension, axis)
        for axis, summing in sums.items():
            self._sums(axis, summing, self._accept_with_weights)
        # Arrays before their weights.
        for var, dimension, axis in sorted(gathers, key=self._is_weight):
            self._gather(var, dimension, axis)
        for axis, summing in sums.items():
            self._sums(axis, summing, self._accept)
        for index, axis in asking:
            known = index in self._taken or (index, axis) in self._asking_weights
            reason = None if known else why_unclear(equations[index], axis)
            if reason:
                self._left_alone(index, equations[index].invars[0], axis, reason)
        if not self._made:
            return self.graph
        gone = self._taken | self._unused()
        scheduled = [Scheduled((position, 0), [made]) for position, made in self._made]
        scheduled += [
            Scheduled((index, 1), [equation])
            for index, equation in enumerate(equations)
            if index not in gone
        ]
        jaxpr = self.graph.jaxpr
        effects = frozenset(jaxpr.effects).union(*(made.effects for _, made in self._made))
        return Graph(jaxpr.replace(eqns=in_order(scheduled), effects=effects))

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

    def _take(self, region: ManualRegion, equation: JaxprEqn) -> None:
        self._taken |= region.replaced
        self._copied |= region.copied
        self._dependencies.add(self._group(region))
        self._made.append((max(region.replaced), equation))

    def _unused(self) -> set[int]:
        """Gathers of weights that only regions need, which have their own."""
        read = {var for _, made in self._made for var in variables(made.invars)}
        unused: set[int] = set()
        for index in sorted(self._copied, reverse=True):
            (var,) = self.graph.equations[index].outvars
            users = self.graph.users(var)
            if var not in read | self.graph.results and unused.union(self._taken).issuperset(users):
                unused.add(index)
        return unused

    def _accept_with_weights(self, region: ManualRegion) -> bool:
        """Replaces a region with the gathers of its weights, if its op executes all of them."""
        found = with_weights(self.graph, region)
        if found is None or not self._dependencies.allows(self._group(found[0])):
            return False
        whole_region, weights = found
        return self._executed(whole_region, region, weights[0].axis, weights)

    def _executed(
        self,
        region: ManualRegion,
        plain: ManualRegion,
        axis: str,
        weights: list[ExplicitWeight],
    ) -> bool:
        """Replaces a region if its op gathers the weights, which the axis shards.

        Else `plain`, the region without their gathers, if these are possible in the op.
        """
        equation = as_shard_map(self.graph, region)
        if isinstance(equation, str) or gradients_end_the_process(equation):
            return False
        with record_decisions(hidden=True) as decisions:
            new, found = self._rewrite(equation)
        gathers = [s for s in found if s.kind == "all_gather" and s.axes == (axis,) and s.replaced]
        if len(gathers) != len(weights) or sums_cannot_be_compiled(new):
            return False
        self._weights |= {(weight.shard, axis) for weight in weights}
        self._asking_weights |= {(weight.index, axis) for weight in weights}
        found_at = [(w.index, gather) for w, gather in zip(weights, gathers, strict=True)]
        self.found += found_at
        if any(gather.kept for gather in gathers):
            # The compiler gathers them once for all their matmuls. Sites are the same.
            self._whole_weights |= {(weight.shard, axis) for weight in weights}
            return self._accept(plain)
        for decision in decisions:
            record(decision)
        self.found += [(region.anchor, site) for site in found if site not in gathers]
        self._take(region, new)
        return True

    def _is_weight(self, gather: tuple[Var, int, str]) -> bool:
        var, _, axis = gather
        return (var, axis) in self._weights

    def _gather_with_weights(self, var: Var, dimension: int, axis: str) -> None:
        """Replaces dots that one gather feeds and whose weights another axis shards."""
        found, _ = self._dots_of(var, dimension, axis)
        weights = {dot: weight_of(self.graph, dot, axis) for dot in found}
        for other in {weight.axis for weight in weights.values() if weight is not None}:
            waiting = {
                dot: path
                for dot, path in found.items()
                if (weight := weights[dot]) is not None and weight.axis == other
            }
            region = self._joined(var, dimension, axis, waiting)
            if region is not None:
                self._accept_with_weights(region)

    def _left_alone(
        self, index: int, array: Atom, axis: str, reason: str, kind: CollectiveKind = "all_gather"
    ) -> None:
        site = left_alone_by_type(self.graph.equations[index], kind, array, axis, reason)
        self.found.append((index, site))

    def _group(self, region: ManualRegion) -> EquationGroup:
        return EquationGroup(region.replaced, tuple(region.inputs(self.graph)))

    def _gathers(self, asking: Iterable[tuple[int, str]]) -> Iterator[tuple[Var, int, str]]:
        """The arrays that are gathered: variable, dimension, axis."""
        for index, axis in asking:
            equation = self.graph.equations[index]
            side = gathered_operand(equation, axis)
            var = None if side is None else equation.invars[side]
            if isinstance(var, Var):
                dimension = placement(var, axis)
                assert isinstance(dimension, int)
                yield var, dimension, axis

    def _gather(self, var: Var, dimension: int, axis: str) -> None:
        """Replaces the dots that one gather feeds, in as many regions as it takes."""
        found, reasons = self._dots_of(var, dimension, axis)
        decided = self._taken | self._kept
        waiting = {dot: path for dot, path in found.items() if dot not in decided}
        known = not self._kept.isdisjoint(found)
        while waiting:
            region = self._joined(var, dimension, axis, waiting)
            if region is None:
                break
            known = True  # The reasons are, if it is refused.
            if self._accept(region):
                # Others that need what it gathered by a reshard have it from there.
                waiting = {d: path for d, path in waiting.items() if self._taken.isdisjoint(path)}
            waiting = {d: path for d, path in waiting.items() if d not in region.equations}
        if known or (var, axis) in self._whole_weights:
            return
        if found:
            reasons.append("its matmul belongs to another site")
        unused = self._unused()
        for index in [user for user in self._users_of(var, axis) if user not in unused][:1]:
            reason = " and ".join(dict.fromkeys(reasons))
            self._left_alone(index, var, axis, reason)

    def _joined(
        self, var: Var, dimension: int, axis: str, dots: dict[int, frozenset[int]]
    ) -> ManualRegion | None:
        """The first of the dots, with those of the others that can be executed together with it."""
        region = None
        for dot, path in sorted(dots.items()):
            before = () if region is None else region.equations
            equations = tuple(sorted({dot}.union(path, before)))
            anchor = min(index for index in equations if index in self.graph.users(var))
            more = ManualRegion(frozenset({axis}), anchor, equations, {var: (axis, dimension)})
            if self._dependencies.allows(self._group(more)):
                region = more
        return region

    def _users_of(self, var: Var, axis: str) -> list[int]:
        """Indices of the equations that gather a variable."""
        users = []
        for index in self.graph.users(var):
            equation = self.graph.equations[index]
            side = gathered_operand(equation, axis) if not is_ours(equation) else None
            if side is not None and equation.invars[side] is var and index not in self._taken:
                users.append(index)
        return users

    def _is_summed(self, equation: JaxprEqn, var: Var, dimension: int | None, axis: str) -> bool:
        """Whether a dot's result is summed over another axis, and the dot is left to that sum.

        Not where it contracts the gathered dimension, as gradients of weights do.
        """
        contracted, _ = equation.params["dimension_numbers"]
        side = 0 if equation.invars[0] is var else 1
        if dimension is None or dimension in contracted[side]:
            return False
        return any(sums(equation, other) for other in explicit_axes(equation) if other != axis)

    def _dots_of(
        self, var: Var, dimension: int, axis: str
    ) -> tuple[dict[int, frozenset[int]], list[str]]:
        """The dots that use a gathered array, each with the equations before it, and other uses."""
        dots: dict[int, frozenset[int]] = {}
        reasons: list[str] = []
        for index in self._users_of(var, axis):
            equation = self.graph.equations[index]
            if equation.primitive.name == "dot_general":
                if equation.invars[0] is equation.invars[1]:
                    reasons.append("the gathered array is multiplied by itself")
                elif self._is_summed(equation, var, dimension, axis):
                    reasons.append(_SUMMED)
                else:
                    dots[index] = frozenset()
            elif other_axes_stay(equation.invars[0], equation.outvars[0], axis):
                self._follow(index, frozenset(), dimension, axis, dots, reasons)
            else:
                reasons.append(f"{described(equation)} changes several mesh axes at once")
        return dots, reasons

    def _follow(
        self,
        index: int,
        path: frozenset[int],
        dimension: int | None,
        axis: str,
        dots: dict[int, frozenset[int]],
        reasons: list[str],
    ) -> None:
        """Adds the dots that use the result of equation `index`, or why others do not fit."""
        (var,), path = self.graph.equations[index].outvars, path | {index}
        if var in self.graph.results:
            reasons.append(f"the gathered array is a result of the function around it; {_NEEDED}")
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
            elif (op := commutes(self.graph, equation)) is not None and op.operand is var:
                if not is_local(equation, axis):
                    reasons.append(f"{described(equation)} shards its result over {axis!r} again")
                    continue
                devices = type_of(var).sharding.mesh.shape[axis]
                after = None if dimension is None else op.dimension_after(dimension, devices)
                self._follow(user, path, after, axis, dots, reasons)
            else:
                reasons.append(f"{described(equation)} uses the gathered array; {_NEEDED}")

    def _sums(self, axis: str, asking: set[int], accept: Callable[[ManualRegion], bool]) -> None:
        """Replaces dots that contract what the axis shards, with the sums over devices."""
        trees: dict[int, tuple[int, ...]] = {}
        for index in summands(self.graph, axis, trees, asking, self._taken):
            while commutes(self.graph, self.graph.equations[index]) is not None:
                (operand,) = [a for a in self.graph.equations[index].invars if isinstance(a, Var)]
                producer = self.graph.producer(operand)
                assert producer is not None
                index = producer
            self._sum(index, axis, trees, accept)

    def _sum(
        self,
        index: int,
        axis: str,
        trees: dict[int, tuple[int, ...]],
        accept: Callable[[ManualRegion], bool],
    ) -> None:
        """Replaces the sum whose last equation is `index`, or else its parts."""
        equations = self.graph.equations
        is_partial = placement(equations[index].outvars[0], axis) == PARTIAL
        if is_partial or not self._kept.isdisjoint(trees[index]):
            return
        region = ManualRegion(frozenset({axis}), index, trees[index], summed=axis)
        if self._dependencies.allows(self._group(region)) and accept(region):
            return
        for part in trees[index]:
            if part != index and equations[part].primitive.name == "dot_general":
                self._sum(part, axis, {part: (part,)}, accept)
