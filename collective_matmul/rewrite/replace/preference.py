"""Which match of a matmul is preferred, and what of a match stays as it is in the program."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from jax.extend.core import Var

from collective_matmul.jaxprs.graph import Graph
from collective_matmul.ops.matmul.backends import REFERENCE
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch
from collective_matmul.rewrite.match.gathers import GatherMatch
from collective_matmul.rewrite.match.matmuls import Matmul
from collective_matmul.rewrite.match.site_selection import Match, PlacedMatch
from collective_matmul.rewrite.match.sums import SumMatch
from collective_matmul.rewrite.match.weight_gathers import weights_of
from collective_matmul.rewrite.replace.splice import TracedSite


def needs_transpose(match: Match) -> bool:
    """Whether the op transposes arrays that the program does not."""
    return len(_plain_products(match)) < match.matmuls


def stays_itself(site: TracedSite) -> bool:
    """Whether the op would gain nothing, and transpose arrays that the program does not."""
    decision, match = site.decisions[0], site.placed.match
    gains = decision.implementation != REFERENCE.name or bool(decision.site.format.fields)
    return not gains and needs_transpose(match)


def shared_out(matches: Sequence[Match]) -> list[Match]:
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
    return [
        matmul.equation.outvars[0]
        for matmul in match.terms
        if not matmul.needs_transpose and not _transposes_x(matmul)
    ]


def _transposes_x(matmul: Matmul) -> bool:
    return matmul.free + matmul.contracted != tuple(range(matmul.x.aval.ndim))


def priority(match: Match) -> tuple[int, bool]:
    """Sort key of matches.

    Gathers come first, then sums, then einsums: a matmul may fit several of them. Within a kind,
    those that transpose nothing come first.
    """
    kinds = (GatherMatch, SumMatch, EinsumMatch)
    return kinds.index(type(match)), needs_transpose(match)


def gathered_weights(
    graph: Graph, matches: Sequence[Match], axis_sizes: dict[str, int]
) -> set[int]:
    """Indices of the gathers of weights that the ops of matches may execute.

    Where both operands of a matmul are gathered, x is the one that the op need not transpose.
    """
    xs = {m.index for m in matches if isinstance(m, GatherMatch) and _plain_products(m)}
    weights = (weight for match in matches for weight in weights_of(graph, match, axis_sizes))
    return {weight.chain[0] for weight in weights} - xs


def with_weights(
    graph: Graph, placed: PlacedMatch, gathered: Set[int], axis_sizes: dict[str, int]
) -> PlacedMatch:
    """The match, with the gathers of its weights if all are among the `gathered`."""
    weights = weights_of(graph, placed.match, axis_sizes)
    if not all(weight.chain[0] in gathered for weight in weights):
        return placed
    return replace(placed, weights=weights)
