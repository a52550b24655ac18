"""Rewrites the jaxprs of a program: finds sites at any depth and replaces them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.jaxprs.bodies import (
    CONTROL_FLOW,
    bodies_of,
    called,
    executes_jaxprs,
    opened,
    with_jaxprs,
)
from collective_matmul.jaxprs.graph import Graph
from collective_matmul.jaxprs.sources import described
from collective_matmul.jaxprs.walks import ByIdentity, counted_equations
from collective_matmul.rewrite.find.divergence import EVERYWHERE, Axes, Divergence, Region, Values
from collective_matmul.rewrite.find.explicit_regions import with_regions
from collective_matmul.rewrite.find.placements import axes_in, misplaced_by_xla, shows_sharding
from collective_matmul.rewrite.find.report import (
    FoundSite,
    FoundSites,
    is_named,
    is_ours,
    reported,
)
from collective_matmul.rewrite.find.scoped_recipes import ScopedRecipes
from collective_matmul.rewrite.find.supported_collectives import holds_collectives, kind_of
from collective_matmul.rewrite.find.written_blocks import WrittenBlocks
from collective_matmul.rewrite.match.normal_form import inlined, normal_form
from collective_matmul.rewrite.replace.residuals import (
    ChunkedResidual,
    ResidualForwarding,
    residuals_of,
)
from collective_matmul.rewrite.replace.rules import rewritten_rules
from collective_matmul.rewrite.replace.site_choice import SiteTracer, Surroundings, selected_sites
from collective_matmul.rewrite.replace.splice import TracedSite, inside_shard_map, splice


class Rewriter:
    """Rewrites jaxprs, each once.

    Args:
      implementation: as the ops take it; for all sites.
      recipes: the recipe of each site.
      axis_sizes: the manual axes around the jaxprs, with their sizes, if they are traced inside a
        shard_map.
      blocks: the hand-written blocks that another rewriter has found in the same jaxprs.
    """

    def __init__(
        self,
        implementation: tuple[str, ...] | None = None,
        recipes: ScopedRecipes | None = None,
        axis_sizes: Mapping[str, int] | None = None,
        blocks: WrittenBlocks | None = None,
    ):
        self._found = FoundSites()
        self._implementation = implementation
        self._around = Surroundings(
            Divergence(axis_sizes or {}),
            recipes or ScopedRecipes(),
            blocks=blocks or WrittenBlocks(),
        )
        self._done = ByIdentity[Any]()
        self._tracer = SiteTracer(implementation)
        #: Chunked residuals of the jaxprs that were made, by the ids of these.
        self._residuals: dict[int, list[ChunkedResidual]] = {}
        self._forwarded = ByIdentity[Any]()
        #: Jaxprs of the shard_maps that are put around sites, by id. `_done` keeps them alive.
        self._regions: set[int] = set()
        self._inlines = True

    @contextlib.contextmanager
    def _within(self, **changes: Any) -> Iterator[None]:
        """Inside the block, the surroundings have other attributes."""
        outside, self._around = self._around, dataclasses.replace(self._around, **changes)
        try:
            yield
        finally:
            self._around = outside

    @contextlib.contextmanager
    def _finding(self) -> Iterator[FoundSites]:
        """Collects what is found inside the block apart from what was found before."""
        before, self._found = self._found, FoundSites()
        try:
            yield self._found
        finally:
            self._found = before

    @property
    def found(self) -> list[FoundSite]:
        """Every gather and sum over devices, in the order of the program."""
        return self._found.counted()

    def rewrite(self, jaxpr: Any, region: Region = EVERYWHERE, runs: int = 1) -> Any:
        """A jaxpr, closed or not, with its sites replaced; the same object if it has none.

        Args:
          jaxpr: the jaxpr.
          region: how the devices execute it.
          runs: how often what holds it executes it.
        """
        key = self._around.shard_maps, region, self._around.recipes

        def rewritten() -> tuple[Any, FoundSites]:
            new, residuals = inner, []
            with self._finding() as found:
                if holds_collectives(inner) or self._shows_sharding(inner):
                    new, residuals = self._rewrite_jaxpr(inner, region)
            if new is inner:
                new = jaxpr
            elif inner is not jaxpr:
                new = jaxpr.replace(jaxpr=new)
            self._residuals[id(new)] = residuals
            return new, found

        inner = opened(jaxpr)
        new, found = self._done.get(jaxpr, key, rewritten)
        self._found.add_inside(found, runs)
        return new

    def _rewrite_jaxpr(
        self, original: Jaxpr, region: Region
    ) -> tuple[Jaxpr, list[ChunkedResidual]]:
        graph = Graph(original)
        if self._around.axis_sizes:
            self._around.blocks.look_into(original)
            graph = normal_form(graph, self._around.axis_sizes)
        else:
            graph = self._with_regions(graph, region)
        equations = self._rewrite_inner(graph, region)
        sites: list[TracedSite] = []
        if self._around.axis_sizes:
            around = dataclasses.replace(self._around, divergent=region.divergent)
            sites, found = selected_sites(graph, self._tracer, around)
            self._found.add(found)
        unchanged = all(a is b for a, b in zip(equations, graph.equations, strict=True))
        if not sites and unchanged:
            return graph.jaxpr, []
        jaxpr = splice(graph, equations, sites)
        return jaxpr, residuals_of(graph, sites, jaxpr)

    def _shows_sharding(self, jaxpr: Jaxpr) -> bool:
        """Whether types may show sites in a jaxpr: outside shard_map, over Explicit axes."""
        return not self._around.axis_sizes and shows_sharding(jaxpr)

    def _with_regions(self, graph: Graph, region: Region) -> Graph:
        """The jaxpr with what communicates by its types in shard_maps, if these have sites."""
        if not self._shows_sharding(graph.jaxpr):
            return graph
        inlined_graph = inlined(graph) if self._inlines else graph
        if inlined_graph is not graph:
            before, after = (self._sites_in(each, region) for each in (graph, inlined_graph))
            graph = inlined_graph if after > before else graph
        values = self._around.divergence.values(graph.jaxpr, region)

        def rewrite(equation: JaxprEqn) -> tuple[JaxprEqn, list[FoundSite]]:
            keeps = not any(map(misplaced_by_xla, equation.outvars))
            with self._finding() as found, self._within(keeps=keeps):
                new = self._rewrite_shard_map(equation, values)
            self._regions.add(id(called(new)))
            return new, found.counted()

        result, found = with_regions(graph, rewrite)
        self._found.add(found)
        return result

    def _sites_in(self, graph: Graph, region: Region) -> int:
        """The number of sites that a program outside shard_map runs, as it is."""
        trial = Rewriter(self._implementation, self._around.recipes, blocks=self._around.blocks)
        trial._inlines = False
        with record_decisions(hidden=True):
            trial.rewrite(graph.jaxpr, region)
        return sum(site.runs for site in trial.found if site.replaced)

    def _rewrite_inner(self, graph: Graph, region: Region) -> list[JaxprEqn]:
        """The equations of a jaxpr, with the jaxprs that they execute rewritten."""
        forwarding = ResidualForwarding(graph, self._forwarded)
        values = self._around.divergence.values(graph.jaxpr, region)
        equations = []
        calls = []
        for index, equation in enumerate(graph.equations):
            if executes_jaxprs(equation):
                calls.append(index)
                equation = forwarding.with_chunk_arguments(index, equation)
                with self._within(recipes=self._around.recipes.within(equation)):
                    equation = self._rewrite_equation(equation, values)
                inside = (self._residuals.get(id(body.value), ()) for body in bodies_of(equation))
                forwarding.offer(index, equation, [*itertools.chain(*inside)])
            equations.append(equation)
        for index in calls:
            equations[index] = forwarding.with_chunk_results(index, equations[index])
        return equations

    def _rewrite_equation(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        """The equation, with the jaxprs that it executes rewritten."""
        name = equation.primitive.name
        if name == "shard_map":
            if id(called(equation)) in self._regions:
                return equation
            return self._rewrite_shard_map(equation, values)
        if name in CONTROL_FLOW and not is_named(equation):
            return self._rewrite_jaxprs(equation, values)
        if self._around.axis_sizes:
            reason = f"it is inside {described(equation)}, which overlap does not rewrite"
            inside = () if is_ours(equation) else counted_equations(equation)
            self._found.add(
                reported(inner, reason, runs=runs) for inner, runs in inside if kind_of(inner)
            )
        return equation

    def _rewrite_jaxprs(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        regions = self._around.divergence.regions_in(equation, values)
        bodies = zip(bodies_of(equation), regions, strict=True)
        jaxprs = [self.rewrite(body.value, region, body.runs) for body, region in bodies]
        equation = with_jaxprs(equation, jaxprs)
        if equation.primitive.name != "custom_vjp_call":
            return equation
        rules = rewritten_rules(equation, self._deferred_rewrite(values.divergent))
        return equation.replace(params={**equation.params, **rules})

    def _deferred_rewrite(self, divergent: Axes) -> Callable[[Any], Any]:
        """A function that rewrites a jaxpr in this place, whenever it is traced."""
        options = self._implementation, self._around.recipes, self._around.axis_sizes

        def rewrite(jaxpr: Any) -> Any:
            rewriter = Rewriter(*options)
            return rewriter.rewrite(jaxpr, rewriter._around.divergence.unknown(jaxpr, divergent))

        return rewrite

    def _rewrite_shard_map(self, equation: JaxprEqn, values: Values) -> JaxprEqn:
        parameters = equation.params
        mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
        sizes = {**self._around.axis_sizes, **{axis: mesh.shape[axis] for axis in sorted(manual)}}
        sharded = map(axes_in, parameters["in_specs"])
        arguments = [a | b for a, b in zip(values.of(equation), sharded, strict=True)]
        with self._within(
            divergence=Divergence(sizes),
            shard_maps=(*self._around.shard_maps, (mesh, manual, parameters["check_vma"])),
        ):
            region = self._around.divergence.region(called(equation), values.divergent, arguments)
            new = inside_shard_map(parameters, lambda: self.rewrite(called(equation), region))
        return with_jaxprs(equation, [new])
