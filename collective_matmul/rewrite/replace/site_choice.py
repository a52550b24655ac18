"""Decides which sites of a jaxpr are replaced, and traces the ops that replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from collective_matmul._compat import ShardingTypeError
from collective_matmul.dispatch.recording import record
from collective_matmul.dispatch.selection import UnsupportedSiteError
from collective_matmul.jaxprs.graph import Graph, type_of
from collective_matmul.jaxprs.sources import source_of
from collective_matmul.log import warn_once
from collective_matmul.operands.format import PLAIN, format_named
from collective_matmul.ops.matmul.backends import REFERENCE
from collective_matmul.ops.matmul.call import Call
from collective_matmul.rewrite.find.divergence import Axes, Divergence
from collective_matmul.rewrite.find.report import FoundSite, is_ours, reported
from collective_matmul.rewrite.find.scoped_recipes import ScopedRecipes
from collective_matmul.rewrite.find.supported_collectives import kind_of
from collective_matmul.rewrite.find.written_blocks import WrittenBlocks
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch
from collective_matmul.rewrite.match.gathers import GatherMatch
from collective_matmul.rewrite.match.normal_form import has_matmul_beside, inlined
from collective_matmul.rewrite.match.site_order import (
    Match,
    PlacedMatch,
    SiteSelection,
    match_at,
)
from collective_matmul.rewrite.match.sums import SumMatch
from collective_matmul.rewrite.match.weight_gathers import weights_of
from collective_matmul.rewrite.replace.replacements import replacements_of, signature
from collective_matmul.rewrite.replace.splice import (
    TracedReplacements,
    TracedSite,
    executed_by,
    instantiate,
    trace,
)


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a jaxpr.

    Attributes:
      divergence: follows values over the manual axes; there are none outside shard_map.
      recipes: the recipe of each site.
      shard_maps: a key of the shard_maps.
      divergent: axes along which devices may execute the jaxpr a different number of times.
      keeps: whether sites that gain nothing stay as they are; not where XLA computes them wrongly.
      blocks: collectives in blocks that have an op of their own.
    """

    divergence: Divergence
    recipes: ScopedRecipes
    shard_maps: tuple = ()
    divergent: Axes = frozenset()
    keeps: bool = True
    blocks: WrittenBlocks = field(default_factory=WrittenBlocks)

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The manual axes, with their sizes."""
        return self.divergence.axis_sizes


class SiteTracer:
    """Traces sites, equal ones once.

    Args:
      implementation: as the ops take it; for all sites.
    """

    def __init__(self, implementation: tuple[str, ...] | None):
        self._implementation = implementation
        self._traced: dict[tuple, TracedReplacements] = {}

    def trace(
        self, placed: PlacedMatch, equation: JaxprEqn, around: Surroundings
    ) -> TracedSite | str:
        """The site of a match, or why the match is left alone.

        Args:
          placed: the match. Its `weights` are those that the op may gather: it does where the
            backend can and gains by it. Else the program's own gathers stay.
          equation: the collective.
          around: what is around it.
        """
        recipe = around.recipes.of(equation)
        alternatives = [placed, replace(placed, weights=())]
        if not placed.weights or (recipe is not None and placed.keeps_gathered):
            del alternatives[0]  # An op in 8 bits that keeps what it gathered gathers no weights.
        for alternative in alternatives:
            try:
                site = self._site(alternative, equation, around)
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
        self, graph: Graph, sites: Sequence[TracedSite], around: Surroundings
    ) -> list[TracedSite]:
        """The sites, of which none gathers a weight that the program gathers in any case."""
        sites = [*sites]
        while True:
            executed = executed_by(graph, sites)
            again = [
                i
                for i, site in enumerate(sites)
                if any(weight.chain[0] not in executed for weight in site.placed.weights)
            ]
            if not again:
                return sites
            for i in again:
                placed = replace(sites[i].placed, weights=())
                sites[i] = self._site(placed, graph.equations[placed.match.index], around)

    def _site(self, placed: PlacedMatch, equation: JaxprEqn, around: Surroundings) -> TracedSite:
        collective = placed.match.collective
        call = Call(
            collective.axis_name,
            None,
            self._implementation,
            divergent_axes=tuple(sorted(around.divergent - {collective.axis_name})),
            source=source_of(equation),
            replaces=collective.kind,
        )
        stored = format_named(around.recipes.of(equation))
        if type_of(equation.invars[0]).dtype == jnp.float64 and stored != PLAIN:
            reason = "float64 has more range than the scales, which are float32"
            call, stored = call.remarking(stored.refusal(reason)), PLAIN
        replacements = replacements_of(placed, call, stored)
        key = around.shard_maps, call, stored, call.source, signature(placed, replacements)
        if key not in self._traced:
            self._traced[key] = trace(replacements)
        return instantiate(placed, replacements, self._traced[key], equation)


def selected_sites(
    graph: Graph, tracer: SiteTracer, around: Surroundings
) -> tuple[list[TracedSite], list[FoundSite]]:
    """The sites of a jaxpr inside shard_map that are replaced, and a report of each collective."""
    selection, inside_calls = SiteSelection(graph), _InsideCalls(graph, around.axis_sizes)
    reports: dict[int, FoundSite] = {}
    matches: list[Match] = []
    for index, equation in enumerate(graph.equations):
        if kind_of(equation) is None or is_ours(equation):
            continue
        match = match_at(graph, index, around.axis_sizes)
        if isinstance(match, str):
            reason = around.blocks.reason(equation) or inside_calls.reason(index)
            reports[index] = reported(equation, reason or match)
        else:
            matches.append(match)
    gathered = _gathered_weights(graph, matches, around)

    def preferred(match: Match) -> tuple:
        return match.index in gathered, _priority(match)

    accepted: dict[int, tuple[PlacedMatch, TracedSite]] = {}
    found = -1
    while len(accepted) > found:
        # A site that was refused may be possible without matmuls that others have taken.
        found, refused = len(accepted), []
        for match in sorted(_shared_out(matches), key=preferred):
            equation = graph.equations[match.index]
            placed = selection.place(match)
            if isinstance(placed, PlacedMatch):
                weights = weights_of(graph, placed.match, around.axis_sizes)
                if all(weight.chain[0] in gathered for weight in weights):
                    placed = replace(placed, weights=weights)
                site = tracer.trace(placed, equation, around)
                if isinstance(site, TracedSite):
                    # Sites are the same for all devices: also where its own equations stay.
                    selection.accept(placed)
                    accepted[match.index] = placed, site
                    continue
                placed = site
            reports.setdefault(match.index, reported(equation, placed))
            refused.append(match.index)
        again = [match_at(graph, index, around.axis_sizes, selection.consumed) for index in refused]
        matches = [match for match in again if not isinstance(match, str)]
    sites = [site for _, site in accepted.values() if not (around.keeps and _stays_itself(site))]
    sites = tracer.without_needed(graph, sites, around)
    reports |= _reports(graph, accepted, sites, around.blocks)
    return sites, [reports[index] for index in sorted(reports)]


class _InsideCalls:
    """Says why collectives are left alone whose matmuls are inside calls beside them.

    Args:
      graph: dataflow of the jaxpr.
      axis_sizes: the manual axes around it, with their sizes.
    """

    def __init__(self, graph: Graph, axis_sizes: Mapping[str, int]):
        self._graph = graph
        self._axis_sizes = axis_sizes

    def reason(self, index: int) -> str | None:
        """The reason for a collective; None if no matmul is inside a call beside it."""
        if not has_matmul_beside(self._graph, index):
            return None
        at = self._places.get(_place_key(self._graph.equations[index]))
        match = None if at is None else match_at(self._inlined, at, self._axis_sizes)
        return match if isinstance(match, str) else None

    @cached_property
    def _inlined(self) -> Graph:
        """The jaxpr with its calls inlined: one of many layers has many collectives."""
        return inlined(self._graph)

    @cached_property
    def _places(self) -> dict[tuple, int]:
        """The indices of collectives with calls inlined."""
        equations = self._inlined.equations
        found = [i for i, equation in enumerate(equations) if kind_of(equation) is not None]
        return {_place_key(equations[i]): i for i in reversed(found)}  # The first, if several.


def _place_key(equation: JaxprEqn) -> tuple:
    """A key that a collective keeps when calls beside it are inlined."""
    return id(equation.source_info), equation.primitive


def _reports(
    graph: Graph,
    accepted: Mapping[int, tuple[PlacedMatch, TracedSite]],
    sites: Sequence[TracedSite],
    blocks: WrittenBlocks,
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
            decision = replace(decision, reason=f"{decision.reason}; {remark}")
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
            reports[weight.chain[0]] = reported(
                gather, reason, decision, matmuls, kept=not executed, is_weight=True
            )
    return reports


def _needs_transpose(match: Match) -> bool:
    """Whether the op transposes arrays that the program does not."""
    return len(_plain_products(match)) < match.matmuls


def _stays_itself(site: TracedSite) -> bool:
    """Whether the op would gain nothing, and transpose arrays that the program does not."""
    decision, match = site.decisions[0], site.placed.match
    gains = decision.implementation != REFERENCE.name or bool(decision.site.format.fields)
    return not gains and _needs_transpose(match)


def _shared_out(matches: Sequence[Match]) -> list[Match]:
    """The matches, of which no gather has a matmul that another match has without transposes.

    Unless it has no others.
    """
    plain = {var for match in matches for var in _plain_products(match)}

    def without_shared(match: Match) -> Match:
        if not isinstance(match, GatherMatch):
            return match
        own = _plain_products(match)
        dots = [dot for dot in match.dots if dot.result in own or dot.result not in plain]
        return replace(match, dots=dots or match.dots)

    return [*map(without_shared, matches)]


def _plain_products(match: Match) -> list[Var]:
    """The products for which the op transposes nothing that the program does not."""
    if isinstance(match, EinsumMatch):
        return match.products  # Einsums multiply chunks in the layout of the program.
    return [matmul.equation.outvars[0] for matmul in match.terms if not matmul.transposes]


def _priority(match: Match) -> tuple[int, bool]:
    """Sort key of matches.

    Gathers come first, then sums, then einsums: a matmul may fit several of them. Within a kind,
    those that transpose nothing come first.
    """
    kinds = (GatherMatch, SumMatch, EinsumMatch)
    return kinds.index(type(match)), _needs_transpose(match)


def _gathered_weights(graph: Graph, matches: Sequence[Match], around: Surroundings) -> set[int]:
    """Indices of the gathers of weights that the ops of matches may execute.

    Where both operands of a matmul are gathered, x is the one that the op need not transpose.
    """
    xs = {m.index for m in matches if isinstance(m, GatherMatch) and _plain_products(m)}
    weights = (w for match in matches for w in weights_of(graph, match, around.axis_sizes))
    return {weight.chain[0] for weight in weights} - xs
