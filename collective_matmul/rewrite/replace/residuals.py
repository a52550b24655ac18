"""Forwards gathered chunks from one call to the matmuls of another, without joining them.

Where JAX differentiates a call of `jax.jit`, the forward becomes one call, which returns the
gathered array as a residual, and the backward another, which contracts its rows for a weight
gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from collective_matmul.jaxprs.bodies import called, with_jaxprs
from collective_matmul.jaxprs.graph import Graph, is_pure, type_of, variables
from collective_matmul.jaxprs.walks import ByIdentity
from collective_matmul.operands.chunked import Chunked
from collective_matmul.rewrite.match.gathers import GatheredDot, GatherMatch, dots_of
from collective_matmul.rewrite.match.normal_form import is_plain_call, narrowed
from collective_matmul.rewrite.match.site_order import PlacedMatch, group_wgrads, tie_to_sum
from collective_matmul.rewrite.replace.replacements import ResidualRef, wgrad_replacements
from collective_matmul.rewrite.replace.splice import TracedSite, instantiate, splice, trace

#: Parameters of a call with one entry for each argument, or for each result.
_PER_ARGUMENT = ("in_shardings", "in_layouts", "donated_invars")
_PER_RESULT = ("out_shardings", "out_layouts")


@dataclass(frozen=True, eq=False)
class ChunkedResidual:
    """A result of a jaxpr that a ring gathered, and that the jaxpr itself does not need whole.

    Attributes:
      position: position among the results.
      whole: the variable.
      chunks: the variables of the chunks that it is joined from.
      match: the gather.
    """

    position: int
    whole: Var
    chunks: Chunked
    match: GatherMatch


def residuals_of(graph: Graph, sites: Sequence[TracedSite], jaxpr: Jaxpr) -> list[ChunkedResidual]:
    """The chunked residuals of a rewritten jaxpr.

    Args:
      graph: dataflow of the jaxpr before it was rewritten.
      sites: the replaced sites.
      jaxpr: the rewritten jaxpr.
    """
    found = []
    for site in sites:
        match = site.placed.match
        if not isinstance(match, GatherMatch) or not isinstance(site.kept, Chunked):
            continue
        unused = site.placed.consumed.issuperset(graph.users(match.root))
        positions = [i for i, atom in enumerate(graph.jaxpr.outvars) if atom is match.root]
        if unused and len(positions) == 1:
            (position,) = positions
            whole: Any = jaxpr.outvars[position]
            found.append(ChunkedResidual(position, whole, site.kept, match))
    return found


class ResidualForwarding:
    """Forwards residuals in chunks between the calls of one jaxpr.

    Pass the calls in order: `with_chunk_arguments`, then `offer`, for each; `with_chunk_results`
    for each at the end.

    Args:
      graph: dataflow of the jaxpr, before anything is replaced.
      done: jaxprs made so far, which equal calls share.
    """

    def __init__(self, graph: Graph, done: ByIdentity[Any]):
        self._graph = graph
        self._done = done
        self._offered: dict[Var, tuple[int, ChunkedResidual]] = {}
        self._taken: dict[int, dict[ChunkedResidual, list[Var]]] = {}

    def offer(self, index: int, call: JaxprEqn, residuals: Sequence[ChunkedResidual]) -> None:
        """Notes the residuals that a call, already rewritten, could return in chunks."""
        if residuals and _can_change(call):
            for residual in residuals:
                self._offered[call.outvars[residual.position]] = index, residual

    def with_chunk_arguments(self, index: int, call: JaxprEqn) -> JaxprEqn:
        """The call, not yet rewritten, taking chunks where its matmuls can."""
        positions = self._acceptable(index, call)
        if not positions:
            return call
        closed = called(call)
        closed, accepted = self._done.get(
            closed, (*positions.items(),), lambda: _take_chunks(closed, positions)
        )
        invars: list[list[Any]] = [[atom] for atom in call.invars]
        for position in sorted(accepted):
            made_by, residual = self._offered[invars[position][0]]
            chunks = [Var(type_of(leaf)) for leaf in jax.tree.leaves(residual.chunks)]
            self._taken.setdefault(made_by, {})[residual] = invars[position] = chunks
        params = _resized(call, closed, _PER_ARGUMENT, map(len, invars))
        return call.replace(params=params, invars=[*itertools.chain(*invars)])

    def with_chunk_results(self, index: int, call: JaxprEqn) -> JaxprEqn:
        """The call, returning chunks where another call took them."""
        taken = {residual.position: residual for residual in self._taken.get(index, {})}
        if not taken:
            return call
        closed = called(call)
        closed = self._done.get(
            closed,
            (*taken.values(),),
            lambda: closed.replace(jaxpr=_return_chunks(closed.jaxpr, taken)),
        )
        outvars = [[var] for var in call.outvars]
        for position, residual in taken.items():
            outvars[position] = self._taken[index][residual]
        params = _resized(call, closed, _PER_RESULT, map(len, outvars))
        return call.replace(params=params, outvars=[*itertools.chain(*outvars)])

    def _acceptable(self, index: int, call: JaxprEqn) -> dict[int, ChunkedResidual]:
        """Arguments that only this call uses and that another call could return in chunks."""
        return {
            position: self._offered[atom][1]
            for position, atom in enumerate(call.invars)
            if isinstance(atom, Var)
            and atom in self._offered
            and self._graph.only_user(atom) == index
            and call.invars.count(atom) == 1
            and _can_change(call)
        }


def _can_change(call: JaxprEqn) -> bool:
    return is_plain_call(call) and is_pure(call)


def _resized(call: JaxprEqn, jaxpr: Any, names: Sequence[str], sizes: Iterable[int]) -> dict:
    """A call's parameters for another jaxpr; entries of one value are repeated for its chunks."""
    params, sizes = dict(with_jaxprs(call, [jaxpr]).params), [*sizes]
    for name in names:
        if name in params:
            pairs = zip(params[name], sizes, strict=True)
            params[name] = tuple(value for value, size in pairs for _ in range(size))
    return params


def _return_chunks(jaxpr: Jaxpr, taken: dict[int, ChunkedResidual]) -> Jaxpr:
    """The jaxpr, returning chunks in place of the arrays joined from them."""
    outvars = []
    for position, var in enumerate(jaxpr.outvars):
        outvars += jax.tree.leaves(taken[position].chunks) if position in taken else [var]
    wholes = {residual.whole for residual in taken.values()}
    equations = [equation for equation in jaxpr.eqns if wholes.isdisjoint(equation.outvars)]
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _take_chunks(closed: Any, positions: dict[int, ChunkedResidual]) -> tuple[Any, set[int]]:
    """A jaxpr whose matmuls take chunks, and the positions of the arguments in chunks."""
    accepted = set()
    for position, residual in sorted(positions.items(), reverse=True):
        jaxpr = _take_one_in_chunks(closed.jaxpr, position, residual)
        if jaxpr is not None:
            closed = closed.replace(jaxpr=jaxpr)
            accepted.add(position)
    return closed, accepted


def _take_one_in_chunks(jaxpr: Jaxpr, position: int, residual: ChunkedResidual) -> Jaxpr | None:
    """The jaxpr with one more argument in chunks; None if something needs it whole."""
    graph = narrowed(Graph(jaxpr))
    match, whole = residual.match, jaxpr.invars[position]
    between: list[int] = []
    dots: list[GatheredDot] = []
    for dot in dots_of(graph, whole, match.view, match.collective.devices, between):
        if isinstance(dot, str) or not dot.contracts_rows or dot.view != match.dots[0].view:
            return None
        dots.append(dot)
    needed = variables(dot.matmul.w for dot in dots)
    derived = {whole, *(var for index in between for var in graph.equations[index].outvars)}
    if not dots or not derived.isdisjoint(needed):
        return None
    first, *others = group_wgrads(graph, dots, fixed=())
    groups = tie_to_sum(graph, first), *others
    equations, sums = _tied_sums(graph, groups[0].tied_sum)
    residual_ref, types = ResidualRef(position), jax.tree.map(type_of, residual.chunks)
    chunks = jax.tree.map(Var, types)
    replacements = wgrad_replacements(groups, residual_ref, sums)
    multiplied = frozenset(dot.index for dot in dots)
    consumed = multiplied | graph.unneeded(between, multiplied, needed)
    placed = PlacedMatch(match, consumed, first.position, later_wgrads=groups)
    tracing = trace(replacements, {residual_ref: types})
    like = graph.equations[first.position]
    site = instantiate(placed, replacements, tracing, like, {residual_ref: chunks})
    invars = [*jaxpr.invars[:position], *jax.tree.leaves(chunks), *jaxpr.invars[position + 1 :]]
    return splice(graph, equations, [site]).replace(invars=invars)


def _tied_sums(graph: Graph, index: int | None) -> tuple[list[JaxprEqn], dict]:
    """The equations, with the result of the tied sum renamed until its weight gradients are ready.

    Also the sum's new and old result, by its index.
    """
    equations = list(graph.equations)
    if index is None:
        return equations, {}
    (read,) = equations[index].outvars
    summed = Var(type_of(read))
    equations[index] = equations[index].replace(outvars=[summed])
    return equations, {index: ([summed], [read])}
