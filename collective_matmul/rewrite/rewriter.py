"""Finds the sites of a program at any depth, and rewrites the jaxprs on the way to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from collective_matmul.backends import RINGS
from collective_matmul.rewrite.collective_equations import collective_of, collectives_in, kind_of
from collective_matmul.rewrite.einsum_matches import EinsumMatch, match_einsum
from collective_matmul.rewrite.gathers import GatherMatch, match_gather
from collective_matmul.rewrite.graph import Graph
from collective_matmul.rewrite.inlining import inlined
from collective_matmul.rewrite.replacements import (
    Replacement,
    einsum_replacement,
    gather_replacements,
    moves_layout,
    signature,
    sum_replacement,
)
from collective_matmul.rewrite.report import (
    FoundSite,
    is_named,
    is_ours,
    left_alone,
    replaced_by,
    source_of,
)
from collective_matmul.rewrite.residuals import Crossing, Residual, residuals_of
from collective_matmul.rewrite.rules import rewritten_rules
from collective_matmul.rewrite.sinking import CHECKPOINTS, sinkable, sunk
from collective_matmul.rewrite.site_selection import Match, Placed, Plan
from collective_matmul.rewrite.splice import TracedSite, Tracing, put_in_place, splice, trace
from collective_matmul.rewrite.sums import SumMatch, match_sum
from collective_matmul.source_location import SourceLocation

#: Calls, loops and branches: each carries out jaxprs among its parameters, and what those read and
#: return is all that it depends on.
_ENTERED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"}
    | {"scan", "while", "cond", "custom_vjp_call", "custom_jvp_call"}
)


class Rewriter:
    """Rewrites jaxprs, each once.

    Attributes:
      found: every gather and sum over devices, in the order of the program.

    Args:
      implementation: requested for all sites, or None.
      axis_sizes: the axes of the shard_maps around the jaxprs, where they are traced inside.
    """

    def __init__(self, implementation: str | None = None, axis_sizes: dict[str, int] | None = None):
        self.found: list[FoundSite] = []
        self._implementation = implementation
        self._axis_sizes = axis_sizes or {}
        self._shard_maps: tuple = ()
        self._done: dict[tuple, tuple[Any, Any]] = {}
        self._traced: dict[tuple, Tracing] = {}
        #: Of the jaxprs that were made, by their ids.
        self._residuals: dict[int, list[Residual]] = {}
        self._crossed: dict[tuple, Any] = {}

    def rewritten(self, jaxpr: Any) -> Any:
        """A jaxpr, closed or not, with its sites replaced; the same object where there are none."""
        key = id(jaxpr), self._shard_maps
        if key not in self._done:
            inner = getattr(jaxpr, "jaxpr", jaxpr)
            new, residuals = inner, []
            if any(collectives_in([inner])):
                new, residuals = self._rewritten(inner)
            if new is inner:
                new = jaxpr
            elif inner is not jaxpr:
                new = jaxpr.replace(jaxpr=new)
            # The original is kept, so that its id stays its own.
            self._done[key] = jaxpr, new
            self._residuals[id(new)] = residuals
        return self._done[key][1]

    def _rewritten(self, original: Jaxpr) -> tuple[Jaxpr, list[Residual]]:
        graph = Graph(original)
        if self._axis_sizes:
            graph = self._brought_together(graph)
        equations = self._insides(graph)
        sites = self._sites(graph) if self._axis_sizes else []
        unchanged = all(a is b for a, b in zip(equations, graph.equations, strict=True))
        if not sites and unchanged:
            return graph.jaxpr, []
        jaxpr = splice(graph, equations, sites)
        return jaxpr, residuals_of(graph, sites, jaxpr)

    def _brought_together(self, graph: Graph) -> Graph:
        """With calls opened or entered, if that makes more matmuls meet their collectives."""
        opened = inlined(graph)
        if opened is not graph and self._matches_in(opened) > self._matches_in(graph):
            graph = opened
        for index in reversed(sinkable(graph)):
            entered = sunk(graph, index)
            if self._matches_in(entered) > self._matches_in(graph):
                graph = entered
        return graph

    def _matches_in(self, graph: Graph) -> int:
        """The sites of a jaxpr and of the calls in it that may be opened or entered."""
        number = 0
        for index, equation in enumerate(graph.equations):
            if equation.primitive.name in CHECKPOINTS | {"jit", "pjit"}:
                inner = equation.params["jaxpr"]
                inner = getattr(inner, "jaxpr", inner)
                number += self._matches_in(Graph(inner)) if any(collectives_in([inner])) else 0
            elif kind_of(equation) is not None and not is_ours(equation):
                number += not isinstance(self._match(graph, index), str)
        return number

    def _insides(self, graph: Graph) -> list[JaxprEqn]:
        """The equations with the jaxprs that they carry out rewritten."""
        crossing = Crossing(graph, self._crossed)
        equations = []
        calls = []
        for index, equation in enumerate(graph.equations):
            if _has_jaxprs(equation):
                calls.append(index)
                equation = self._inside(crossing.receiving(index, equation))
                inner = id(equation.params.get("jaxpr"))
                crossing.offer(index, equation, self._residuals.get(inner, ()))
            equations.append(equation)
        for index in calls:
            equations[index] = crossing.returning(index, equations[index])
        return equations

    def _inside(self, equation: JaxprEqn) -> JaxprEqn:
        """The equation with the jaxprs that it carries out rewritten."""
        name = equation.primitive.name
        if name == "shard_map":
            return self._inside_shard_map(equation)
        if name in _ENTERED and not is_named(equation):
            return self._with_jaxprs(equation)
        if self._axis_sizes:
            reason = f"it is inside {name}, which is not entered"
            inside = collectives_in(jaxprs_in_params(equation.params))
            unseen = [inner for inner in inside if not is_ours(equation)]
            self.found += [left_alone(inner, reason) for inner in unseen]
        return equation

    def _with_jaxprs(self, equation: JaxprEqn) -> JaxprEqn:
        changed: dict[str, Any] = {}
        for name, value in equation.params.items():
            if _is_jaxpr(value):
                new = self.rewritten(value)
            elif isinstance(value, tuple) and value and all(map(_is_jaxpr, value)):
                new = tuple(map(self.rewritten, value))
                new = value if all(a is b for a, b in zip(new, value, strict=True)) else new
            else:
                continue
            if new is not value:
                changed[name] = new
        if equation.primitive.name == "custom_vjp_call":
            changed |= rewritten_rules(equation, self._later())
        if not changed:
            return equation
        return equation.replace(params={**equation.params, **changed})

    def _later(self) -> Callable[[Any], Any]:
        """Rewrites a jaxpr that is traced here, but not before it is needed."""
        implementation, axis_sizes = self._implementation, dict(self._axis_sizes)
        return lambda jaxpr: Rewriter(implementation, axis_sizes).rewritten(jaxpr)

    def _inside_shard_map(self, equation: JaxprEqn) -> JaxprEqn:
        parameters = equation.params
        mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
        outside = self._axis_sizes, self._shard_maps
        self._axis_sizes = self._axis_sizes | {axis: mesh.shape[axis] for axis in sorted(manual)}
        self._shard_maps += ((mesh, manual, parameters["check_vma"]),)
        try:
            return _within_shard_map(parameters, lambda: self._with_jaxprs(equation))
        finally:
            self._axis_sizes, self._shard_maps = outside

    def _sites(self, graph: Graph) -> list[TracedSite]:
        """The sites of one jaxpr inside shard_map; first those that transpose nothing."""
        plan = Plan(graph)
        reports: dict[int, FoundSite] = {}
        matches: list[Match] = []
        for index, equation in enumerate(graph.equations):
            if kind_of(equation) is None or is_ours(equation):
                continue
            match = self._match(graph, index)
            if isinstance(match, str):
                reports[index] = left_alone(equation, match)
            else:
                matches.append(match)
        sites = []
        for match in sorted(matches, key=_order):
            equation = graph.equations[match.index]
            site = self._site(plan, match)
            if isinstance(site, str):
                reports[match.index] = left_alone(equation, site)
            else:
                plan.accept(site.placed)
                sites.append(site)
                reports[match.index] = replaced_by(equation, match.matmuls, site.decisions[0])
        self.found += [reports[index] for index in sorted(reports)]
        return sites

    def _match(self, graph: Graph, index: int) -> Match | str:
        collective = collective_of(graph.equations[index], self._axis_sizes)
        if isinstance(collective, str):
            return collective
        matching = match_gather if collective.kind == "all_gather" else match_sum
        found = matching(graph, index, collective)
        if isinstance(found, str):
            return match_einsum(graph, index, collective) or found
        return found

    def _site(self, plan: Plan, match: Match) -> TracedSite | str:
        """The match traced, or why it is left alone."""
        placed = plan.place(match)
        if isinstance(placed, str):
            return placed
        equation = plan.graph.equations[match.index]
        source = source_of(equation)
        obstacle = _obstacle(placed, self._implementation)
        if obstacle:
            return obstacle
        replacements = self._replacements(placed, equation, source)
        key = self._shard_maps, source, signature(placed, replacements)
        if key not in self._traced:
            self._traced[key] = trace(replacements)
        site = put_in_place(placed, replacements, self._traced[key], equation)
        decision = site.decisions[0]
        if decision.implementation == "xla" and moves_layout(match):
            return f"arrays would be transposed for nothing ({decision.reason})"
        return site

    def _replacements(
        self, placed: Placed, equation: JaxprEqn, source: SourceLocation | None
    ) -> Sequence[Replacement]:
        match = placed.match
        if isinstance(match, GatherMatch):
            (shard,) = equation.invars
            return gather_replacements(placed, shard, self._implementation, source)
        if isinstance(match, EinsumMatch):
            return [einsum_replacement(match, equation.invars[0], self._implementation, source)]
        return [sum_replacement(match, equation.outvars[0], self._implementation, source)]


def _order(match: Match) -> tuple[int, bool]:
    """Gathers first, which may share their matmuls; of each kind, those that transpose nothing."""
    kinds = (GatherMatch, SumMatch, EinsumMatch)
    return kinds.index(type(match)), moves_layout(match)


def _obstacle(placed: Placed, implementation: str | None) -> str | None:
    """Why the implementation requested cannot carry out a site."""
    match = placed.match
    if not isinstance(match, SumMatch) or match.collective.kind != "psum":
        return None
    rows = math.prod(match.rows)
    if implementation not in RINGS or rows % match.collective.devices == 0:
        return None
    return f"{implementation} needs rows that the axis divides, and there are {rows}"


def _within_shard_map(parameters: dict[str, Any], fun: Callable[[], JaxprEqn]) -> JaxprEqn:
    """Calls a function where a shard_map with these parameters carries out its body."""
    results = []

    def body() -> tuple:
        results.append(fun())
        return ()

    sharded = jax.shard_map(
        body,
        mesh=parameters["mesh"],
        in_specs=(),
        out_specs=(),
        axis_names=set(parameters["newly_manual_axes"]),
        check_vma=parameters["check_vma"],
    )
    jax.make_jaxpr(sharded)()
    return results[0]


def _has_jaxprs(equation: JaxprEqn) -> bool:
    """Whether it carries out jaxprs. Most do not, and large programs have many: no generators."""
    for value in equation.params.values():
        if isinstance(value, tuple):
            for inner in value:
                if _is_jaxpr(inner):
                    return True
        elif _is_jaxpr(value):
            return True
    return False


def _is_jaxpr(value: Any) -> bool:
    return isinstance(getattr(value, "jaxpr", value), Jaxpr)
