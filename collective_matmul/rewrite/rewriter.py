"""Rewrites the jaxprs of a program: finds sites at any depth and replaces them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.dispatch.recording import record, record_decisions
from collective_matmul.jaxprs.bodies import (
    CONTROL_FLOW,
    bodies_of,
    called,
    executes_jaxprs,
    jaxprs_of,
    opened,
    with_jaxprs,
)
from collective_matmul.jaxprs.graph import Graph
from collective_matmul.jaxprs.walks import all_equations
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.rewrite.find.blocks import Blocks
from collective_matmul.rewrite.find.collective_equations import (
    collective_of,
    holds_collectives,
    kind_of,
)
from collective_matmul.rewrite.find.divergence import (
    EVERYWHERE,
    Axes,
    Divergence,
    Region,
    Values,
    axes_of_spec,
)
from collective_matmul.rewrite.find.explicit_regions import with_regions
from collective_matmul.rewrite.find.placements import misplaced_by_xla, shows_sharding
from collective_matmul.rewrite.find.report import (
    FoundSite,
    described,
    is_named,
    is_ours,
    reported,
)
from collective_matmul.rewrite.match.einsum_matches import match_einsum
from collective_matmul.rewrite.match.gathers import match_gather
from collective_matmul.rewrite.match.inlining import has_matmul_beside, inlined
from collective_matmul.rewrite.match.narrowing import narrow_matmuls, narrowed
from collective_matmul.rewrite.match.sinking import CHECKPOINTS, sinkable, sunk
from collective_matmul.rewrite.match.site_selection import Match, PlacedMatch, SiteSelection
from collective_matmul.rewrite.match.sums import match_sum
from collective_matmul.rewrite.replace.preference import (
    gathered_weights,
    priority,
    shared_out,
    stays_itself,
    with_weights,
)
from collective_matmul.rewrite.replace.residuals import (
    ChunkedResidual,
    ResidualForwarding,
    residuals_of,
)
from collective_matmul.rewrite.replace.rules import rewritten_rules
from collective_matmul.rewrite.replace.site_tracing import SiteTracer
from collective_matmul.rewrite.replace.splice import TracedSite, inside_shard_map, splice
from collective_matmul.rewrite.scoped_recipes import ScopedRecipes


class Rewriter:
    """Rewrites jaxprs, each once.

    Attributes:
      found: every gather and sum over devices, in the order of the program.
      keys: the keys of those outside shard_map, by the ids of the equations that communicate.

    Args:
      implementation: as the ops take it; for all sites.
      recipes: the recipe of each site.
      axis_sizes: the manual axes around the jaxprs, with their sizes, if they are traced inside a
        shard_map.
    """

    def __init__(
        self,
        implementation: tuple[str, ...] | None = None,
        recipes: ScopedRecipes | None = None,
        axis_sizes: dict[str, int] | None = None,
    ):
        self.found: list[FoundSite] = []
        self.keys: dict[int, tuple] = {}
        self._implementation = implementation
        self._recipes = recipes or ScopedRecipes()
        self._axis_sizes = axis_sizes or {}
        self._divergence = Divergence(self._axis_sizes)
        self._shard_maps: tuple = ()
        self._done: dict[tuple, tuple[Any, Any]] = {}
        self._tracer = SiteTracer(implementation, self._recipe_of)
        #: Chunked residuals of the jaxprs that were made, by the ids of these.
        self._residuals: dict[int, list[ChunkedResidual]] = {}
        self._forwarded: dict[tuple, Any] = {}
        self._blocks = Blocks()
        #: Jaxprs of the shard_maps that are put around sites, by id. `_done` keeps them alive.
        self._regions: set[int] = set()
        self._inlines = True
        #: Whether sites that gain nothing stay as they are; not where XLA computes them wrongly.
        self._keeps = True

    def rewrite(self, jaxpr: Any, region: Region = EVERYWHERE) -> Any:
        """A jaxpr, closed or not, with its sites replaced; the same object if it has none.

        Args:
          jaxpr: the jaxpr.
          region: how the devices execute it.
        """
        key = id(jaxpr), self._shard_maps, region, self._recipes
        if not self._inlines:  # Sites of a trial count for each call.
            key = (*key, len(self._done))
        if key not in self._done:
            inner = opened(jaxpr)
            new, residuals = inner, []
            if holds_collectives(inner) or self._shows_sharding(inner):
                new, residuals = self._rewrite_jaxpr(inner, region)
            if new is inner:
                new = jaxpr
            elif inner is not jaxpr:
                new = jaxpr.replace(jaxpr=new)
            # Keep the original alive, so that no other object gets its id.
            self._done[key] = jaxpr, new
            self._residuals[id(new)] = residuals
        return self._done[key][1]

    def _rewrite_jaxpr(
        self, original: Jaxpr, region: Region
    ) -> tuple[Jaxpr, list[ChunkedResidual]]:
        graph = Graph(original)
        if self._axis_sizes:
            self._blocks.look_into(original)
            graph = self._narrowed(self._bring_together(graph))
        else:
            graph = self._with_regions(graph, region)
        equations = self._rewrite_inner(graph, region)
        sites = self._select_sites(graph, region.divergent) if self._axis_sizes else []
        unchanged = all(a is b for a, b in zip(equations, graph.equations, strict=True))
        if not sites and unchanged:
            return graph.jaxpr, []
        jaxpr = splice(graph, equations, sites)
        return jaxpr, residuals_of(graph, sites, jaxpr)

    def _shows_sharding(self, jaxpr: Jaxpr) -> bool:
        """Whether types may show sites in a jaxpr: outside shard_map, over Explicit axes."""
        return not self._axis_sizes and shows_sharding(jaxpr)

    def _with_regions(self, graph: Graph, region: Region) -> Graph:
        """The jaxpr with what communicates by its types in shard_maps, if these have sites."""
        if not self._shows_sharding(graph.jaxpr):
            return graph
        inlined_graph = inlined(graph) if self._inlines else graph
        if inlined_graph is not graph:
            before, after = (self._sites_in(each, region) for each in (graph, inlined_graph))
            graph = inlined_graph if after > before else graph
        values = self._divergence.values(graph.jaxpr, region)
        before = self.found

        def rewrite(equation: JaxprEqn) -> tuple[JaxprEqn, list[FoundSite]]:
            self.found = []
            self._keeps = not any(map(misplaced_by_xla, equation.outvars))
            new = self._rewrite_shard_map(equation, values)
            self._keeps = True
            self._regions.add(id(called(new)))
            return new, self.found

        result, found = with_regions(graph, rewrite)
        self.found = before + [site for _, site in found]
        self.keys.update((id(equation), site.key) for equation, site in found)
        return result

    def _sites_in(self, graph: Graph, region: Region) -> int:
        """The number of sites of a program outside shard_map, as it is."""
        trial = Rewriter(self._implementation, self._recipes)
        trial._inlines = False
        with record_decisions(hidden=True):
            trial.rewrite(graph.jaxpr, region)
        return sum(site.replaced for site in trial.found)

    def _bring_together(self, graph: Graph) -> Graph:
        """Inlines calls and moves collectives into checkpoints where that adds sites."""
        inlined_graph = inlined(graph)
        if inlined_graph is not graph and self._matches_in(inlined_graph) > self._matches_in(graph):
            graph = inlined_graph
        for index in reversed(sinkable(graph)):
            sunk_graph = sunk(graph, index)
            if self._matches_in(sunk_graph) > self._matches_in(graph):
                graph = sunk_graph
        return graph

    def _narrowed(self, graph: Graph) -> Graph:
        """The jaxpr with those matmuls in half precision that sites can execute then only."""
        trial, narrow = narrowed(graph, narrow_matmuls(graph))
        matches = (
            self._match(trial, index)
            for index, equation in enumerate(trial.equations)
            if narrow and kind_of(equation) is not None and not is_ours(equation)
        )
        products = {
            var for match in matches if not isinstance(match, str) for var in match.products
        }
        return narrowed(graph, [matmul for var, matmul in narrow.items() if var in products])[0]

    def _matches_in(self, graph: Graph) -> int:
        """The number of sites in a jaxpr, and in the calls and checkpoints that it holds."""
        number = 0
        graph, _ = narrowed(graph, narrow_matmuls(graph))
        for index, equation in enumerate(graph.equations):
            if equation.primitive.name in CHECKPOINTS | {"jit", "pjit"}:
                inner = opened(called(equation))
                number += self._matches_in(Graph(inner)) if holds_collectives(inner) else 0
            elif kind_of(equation) is not None and not is_ours(equation):
                number += not isinstance(self._match(graph, index), str)
        return number

    def _rewrite_inner(self, graph: Graph, region: Region) -> list[JaxprEqn]:
        """The equations of a jaxpr, with the jaxprs that they execute rewritten."""
        forwarding = ResidualForwarding(graph, self._forwarded)
        values = self._divergence.values(graph.jaxpr, region)
        equations = []
        calls = []
        for index, equation in enumerate(graph.equations):
            if executes_jaxprs(equation):
                calls.append(index)
                equation = forwarding.with_chunk_arguments(index, equation)
                equation = self._rewrite_equation(equation, values)
                inside = (self._residuals.get(id(body.value), ()) for body in bodies_of(equation))
                forwarding.offer(index, equation, [*itertools.chain(*inside)])
            equations.append(equation)
        for index in calls:
            equations[index] = forwarding.with_chunk_results(index, equations[index])
        return equations

    def _recipe_of(self, equation: JaxprEqn) -> RecipeName | None:
        return self._recipes.of(equation)

    def _rewrite_equation(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        """The equation, with the jaxprs that it executes rewritten."""
        outside, self._recipes = self._recipes, self._recipes.within(equation)
        try:
            return self._rewrite_within(equation, values)
        finally:
            self._recipes = outside

    def _rewrite_within(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        name = equation.primitive.name
        if name == "shard_map":
            if id(called(equation)) in self._regions:
                return equation
            return self._rewrite_shard_map(equation, values)
        if name in CONTROL_FLOW and not is_named(equation):
            return self._rewrite_jaxprs(equation, values)
        if self._axis_sizes:
            reason = f"it is inside {described(equation)}, which overlap does not rewrite"
            inside = () if is_ours(equation) else all_equations(*jaxprs_of(equation))
            self.found += [reported(inner, reason) for inner in inside if kind_of(inner)]
        return equation

    def _rewrite_jaxprs(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        regions = self._divergence.regions_in(equation, values)
        jaxprs = [body.value for body in bodies_of(equation)]
        equation = with_jaxprs(equation, [*map(self.rewrite, jaxprs, regions)])
        if equation.primitive.name != "custom_vjp_call":
            return equation
        rules = rewritten_rules(equation, self._deferred_rewrite(values.divergent))
        return equation.replace(params={**equation.params, **rules})

    def _deferred_rewrite(self, divergent: Axes) -> Callable[[Any], Any]:
        """A function that rewrites a jaxpr in this place, whenever it is traced."""
        options = self._implementation, self._recipes, dict(self._axis_sizes)

        def rewrite(jaxpr: Any) -> Any:
            rewriter = Rewriter(*options)
            return rewriter.rewrite(jaxpr, rewriter._divergence.unknown(jaxpr, divergent))

        return rewrite

    def _rewrite_shard_map(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        parameters = equation.params
        mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
        outside = self._axis_sizes, self._shard_maps, self._divergence
        self._axis_sizes = self._axis_sizes | {axis: mesh.shape[axis] for axis in sorted(manual)}
        self._shard_maps += ((mesh, manual, parameters["check_vma"]),)
        self._divergence = Divergence(self._axis_sizes)
        sharded = map(axes_of_spec, parameters["in_specs"])
        arguments = [a | b for a, b in zip(values.of(equation), sharded, strict=True)]
        region = self._divergence.region(called(equation), values.divergent, arguments)
        try:
            new = inside_shard_map(parameters, lambda: self.rewrite(called(equation), region))
        finally:
            self._axis_sizes, self._shard_maps, self._divergence = outside
        return with_jaxprs(equation, [new])

    def _select_sites(self, graph: Graph, divergent: Axes) -> list[TracedSite]:
        """Selects and traces the sites of a jaxpr inside shard_map. Reports every collective."""
        selection = SiteSelection(graph)
        reports: dict[int, FoundSite] = {}
        matches: list[Match] = []
        for index, equation in enumerate(graph.equations):
            if kind_of(equation) is None or is_ours(equation):
                continue
            match = self._match(graph, index)
            if isinstance(match, str):
                reason = self._blocks.reason(equation) or self._reason_inside(graph, index)
                reports[index] = reported(equation, reason or match)
            else:
                matches.append(match)
        gathered = gathered_weights(graph, matches, self._axis_sizes)
        context = self._shard_maps, divergent

        def preferred(match: Match) -> tuple:
            return match.index in gathered, priority(match)

        accepted: dict[int, tuple[PlacedMatch, TracedSite]] = {}
        found = -1
        while len(accepted) > found:
            # A site that was refused may be possible without matmuls that others have taken.
            found, refused = len(accepted), []
            for match in sorted(shared_out(matches), key=preferred):
                equation = graph.equations[match.index]
                placed = selection.place(match)
                if isinstance(placed, PlacedMatch):
                    placed = with_weights(graph, placed, gathered, self._axis_sizes)
                    site = self._tracer.trace(placed, equation, *context)
                    if isinstance(site, TracedSite):
                        # Sites are the same for all devices: also where its own equations stay.
                        selection.accept(placed)
                        accepted[match.index] = placed, site
                        continue
                    placed = site
                reports.setdefault(match.index, reported(equation, placed))
                refused.append(match.index)
            again = [self._match(graph, index, selection.consumed) for index in refused]
            matches = [match for match in again if not isinstance(match, str)]
        sites = [site for _, site in accepted.values() if not (self._keeps and stays_itself(site))]
        sites = self._tracer.without_needed(graph, sites, *context)
        reports |= _reports(graph, accepted, sites, self._blocks)
        self.found += [reports[index] for index in sorted(reports)]
        return sites

    def _match(self, graph: Graph, index: int, taken: Set[int] = frozenset()) -> Match | str:
        """The match of a collective without the matmuls that are taken, or why there is none."""
        collective = collective_of(graph.equations[index], self._axis_sizes)
        if isinstance(collective, str):
            return collective
        if collective.kind == "all_gather":
            found = match_gather(graph, index, collective, taken)
        else:
            found = match_sum(graph, index, collective)
        if isinstance(found, str):
            return match_einsum(graph, index, collective) or found
        return found

    def _reason_inside(self, graph: Graph, index: int) -> str | None:
        """Why a collective is left alone, where its matmul is inside a call beside it."""
        if not has_matmul_beside(graph, index):
            return None
        equation, inside = graph.equations[index], inlined(graph)
        for at, other in enumerate(inside.equations):
            if other.source_info is equation.source_info and other.primitive is equation.primitive:
                match = self._match(inside, at)
                return match if isinstance(match, str) else None
        return None


def _reports(
    graph: Graph,
    accepted: Mapping[int, tuple[PlacedMatch, TracedSite]],
    sites: Sequence[TracedSite],
    blocks: Blocks,
) -> dict[int, FoundSite]:
    """The reports of accepted sites, and of gathers of weights that are possible in their ops.

    Records the decisions of those that replace equations.

    Args:
      graph: dataflow of the jaxpr.
      accepted: the matches, with all such gathers, and their sites, by the index of the collective.
      sites: those that replace equations of the program, as they do.
      blocks: what has an op of its own, which the reports name.
    """
    reports: dict[int, FoundSite] = {}
    replacing = {site.placed.match.index: site for site in sites}
    for index, (placed, traced) in accepted.items():
        site, replaced = replacing.get(index, traced), index in replacing
        decision, matmuls = site.decisions[0], placed.match.matmuls
        equation = graph.equations[index]
        if remark := blocks.remark(equation):
            decision = dataclasses.replace(decision, reason=f"{decision.reason}; {remark}")
        why = reason = decision.reason
        if replaced:
            record(decision)
        else:
            reason = f"arrays would be transposed without gain ({why})"
        reports[index] = reported(equation, reason, decision, matmuls, kept=not replaced)
        executed = replaced and bool(site.placed.weights)
        reason = why if executed else f"gathered before the matmul ({why})"
        for weight in placed.weights:
            gather = graph.equations[weight.chain[0]]
            reports[weight.chain[0]] = reported(gather, reason, decision, matmuls, not executed)
    return reports
