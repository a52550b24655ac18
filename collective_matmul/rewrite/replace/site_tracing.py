"""Traces the ops that replace the sites of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from collective_matmul._compat import ShardingTypeError
from collective_matmul.dispatch.selection import UnsupportedSiteError
from collective_matmul.jaxprs.graph import Graph, type_of
from collective_matmul.log import warn_once
from collective_matmul.operands.format import PLAIN, format_named
from collective_matmul.ops.matmul.backends import REFERENCE
from collective_matmul.ops.matmul.call import Call
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.rewrite.find.divergence import Axes
from collective_matmul.rewrite.find.report import source_of
from collective_matmul.rewrite.match.site_selection import PlacedMatch
from collective_matmul.rewrite.replace.replacements import replacements_of, signature
from collective_matmul.rewrite.replace.splice import (
    TracedReplacements,
    TracedSite,
    executed_by,
    instantiate,
    trace,
)


class SiteTracer:
    """Traces sites, equal ones once.

    Args:
      implementation: as the ops take it; for all sites.
      recipe_of: the `fp8` of a site by its collective, as the ops take it.
    """

    def __init__(
        self,
        implementation: tuple[str, ...] | None,
        recipe_of: Callable[[JaxprEqn], RecipeName | None],
    ):
        self._implementation = implementation
        self._recipe_of = recipe_of
        self._traced: dict[tuple, TracedReplacements] = {}

    def trace(
        self, placed: PlacedMatch, equation: JaxprEqn, shard_maps: tuple, divergent: Axes
    ) -> TracedSite | str:
        """The site of a match, or why the match is left alone.

        Args:
          placed: the match. Its `weights` are those that the op may gather: it does where the
            backend can and gains by it. Else the program's own gathers stay.
          equation: the collective.
          shard_maps: a key of the shard_maps around it.
          divergent: axes along which devices may execute it a different number of times.
        """
        recipe = self._recipe_of(equation)
        alternatives = [placed, replace(placed, weights=())]
        if not placed.weights or (recipe is not None and placed.keeps_gathered):
            del alternatives[0]  # An op in 8 bits that keeps what it gathered gathers no weights.
        for alternative in alternatives:
            try:
                site = self._site(alternative, equation, shard_maps, divergent)
            except UnsupportedSiteError as error:
                reason = error.reason
                continue
            except ShardingTypeError:
                return "the op would reshape what an explicit mesh axis shards"
            decision = site.decisions[0]
            gains = decision.implementation != REFERENCE.name or decision.site.format != PLAIN
            if gains or not alternative.weights:
                return site
        # Who requests a backend by name expects it, and may not call `explain`.
        warn_once(f"overlap leaves {placed.match.collective.kind} alone: {reason}")
        return reason

    def without_needed(
        self, graph: Graph, sites: Sequence[TracedSite], shard_maps: tuple, divergent: Axes
    ) -> list[TracedSite]:
        """The sites, of which none gathers a weight that the program gathers in any case."""
        while True:
            executed = executed_by(graph, sites)
            sites = [*sites]
            again = [
                i
                for i, site in enumerate(sites)
                if any(weight.chain[0] not in executed for weight in site.placed.weights)
            ]
            if not again:
                return sites
            for i in again:
                placed = replace(sites[i].placed, weights=())
                equation = graph.equations[placed.match.index]
                sites[i] = self._site(placed, equation, shard_maps, divergent)

    def _site(
        self, placed: PlacedMatch, equation: JaxprEqn, shard_maps: tuple, divergent: Axes
    ) -> TracedSite:
        collective = placed.match.collective
        call = Call(
            collective.axis_name,
            None,
            self._implementation,
            divergent_axes=tuple(sorted(divergent - {collective.axis_name})),
            source=source_of(equation),
            replaces=collective.kind,
        )
        stored = format_named(self._recipe_of(equation))
        if type_of(equation.invars[0]).dtype == jnp.float64 and stored != PLAIN:
            reason = "float64 has more range than the scales, which are float32"
            call, stored = call.remarking(stored.refusal(reason)), PLAIN
        replacements = replacements_of(placed, call, stored)
        key = shard_maps, call, stored, call.source, signature(placed, replacements)
        if key not in self._traced:
            self._traced[key] = trace(replacements)
        return instantiate(placed, replacements, self._traced[key], equation)
