"""Takes what a ring gathered from one call to matmuls in another, in chunks.

Where JAX differentiates a call of `jax.jit`, the forward is one call, whose result the gathered
array is, and the backward another, which contracts its rows for a weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from collective_matmul.backends.chunked_array import ChunkedArray
from collective_matmul.rewrite.gathers import GatherMatch, Use, uses_of
from collective_matmul.rewrite.graph import Graph, is_pure, type_of
from collective_matmul.rewrite.grouped_wgrad import launches_of, tied
from collective_matmul.rewrite.inlining import is_plain_call
from collective_matmul.rewrite.replacements import Handle, launched
from collective_matmul.rewrite.site_selection import Placed, consumed_by
from collective_matmul.rewrite.splice import TracedSite, put_in_place, splice, trace

_OF_ARGUMENTS = ("in_shardings", "in_layouts", "donated_invars")
_OF_RESULTS = ("out_shardings", "out_layouts")


@dataclass(frozen=True, eq=False)
class Residual:
    """A result of a jaxpr that a ring gathered, and that nothing in the jaxpr needs whole.

    Attributes:
      place: among the results.
      whole: the variable.
      chunks: variables, of which it is made.
      match: of the gather.
    """

    place: int
    whole: Var
    chunks: ChunkedArray
    match: GatherMatch


def residuals_of(graph: Graph, sites: Sequence[TracedSite], jaxpr: Jaxpr) -> list[Residual]:
    """Those of a jaxpr whose sites were replaced, from that before it."""
    found = []
    for site in sites:
        match = site.placed.match
        if not isinstance(match, GatherMatch) or not isinstance(site.kept, ChunkedArray):
            continue
        unused = site.placed.consumed.issuperset(graph.users(match.root))
        places = [i for i, atom in enumerate(graph.jaxpr.outvars) if atom is match.root]
        if unused and len(places) == 1:
            (place,) = places
            whole: Any = jaxpr.outvars[place]
            found.append(Residual(place, whole, site.kept, match))
    return found


class Crossing:
    """The calls of one jaxpr, in order, and the residuals that go from one to another.

    Args:
      graph: of the jaxpr, before anything is replaced.
      done: jaxprs made so far, which equal calls share.
    """

    def __init__(self, graph: Graph, done: dict[tuple, Any]):
        self._graph = graph
        self._done = done
        self._offered: dict[Var, tuple[int, Residual]] = {}
        self._taken: dict[int, dict[Residual, list[Var]]] = {}

    def offer(self, index: int, call: JaxprEqn, residuals: Sequence[Residual]) -> None:
        """Notes what a call, its own jaxpr rewritten, could return in chunks."""
        if residuals and _can_change(call):
            for residual in residuals:
                self._offered[call.outvars[residual.place]] = index, residual

    def receiving(self, index: int, call: JaxprEqn) -> JaxprEqn:
        """A call, not yet rewritten, that takes chunks where its matmuls can."""
        places = self._places(index, call)
        if not places:
            return call
        key = id(call.params["jaxpr"]), *places.items()
        if key not in self._done:
            closed = call.params["jaxpr"]
            # The original is kept, so that its id stays its own.
            self._done[key] = closed, _with_chunks(closed, places)
        _, (closed, accepted) = self._done[key]
        sizes, invars = [], []
        for place, atom in enumerate(call.invars):
            if place in accepted and isinstance(atom, Var):
                made_by, residual = self._offered[atom]
                chunks = [Var(type_of(leaf)) for leaf in jax.tree.leaves(residual.chunks)]
                self._taken.setdefault(made_by, {})[residual] = chunks
            else:
                chunks = [atom]
            invars += chunks
            sizes.append(len(chunks))
        params = _resized(call, closed, _OF_ARGUMENTS, sizes)
        return call.replace(params=params, invars=invars)

    def returning(self, index: int, call: JaxprEqn) -> JaxprEqn:
        """A call that returns chunks where they were taken."""
        taken = {residual.place: residual for residual in self._taken.get(index, {})}
        if not taken:
            return call
        closed = call.params["jaxpr"]
        key = id(closed), *taken.values()
        if key not in self._done:
            self._done[key] = closed, closed.replace(jaxpr=_returning(closed.jaxpr, taken))
        closed = self._done[key][1]
        results = [
            self._taken[index][taken[place]] if place in taken else [var]
            for place, var in enumerate(call.outvars)
        ]
        params = _resized(call, closed, _OF_RESULTS, [len(vars) for vars in results])
        return call.replace(params=params, outvars=[var for vars in results for var in vars])

    def _places(self, index: int, call: JaxprEqn) -> dict[int, Residual]:
        """Arguments of a call that alone uses what another call could return in chunks."""
        return {
            place: self._offered[atom][1]
            for place, atom in enumerate(call.invars)
            if isinstance(atom, Var)
            and atom in self._offered
            and self._graph.only_user(atom) == index
            and call.invars.count(atom) == 1
            and _can_change(call)
        }


def _can_change(call: JaxprEqn) -> bool:
    return is_plain_call(call) and is_pure(call)


def _resized(call: JaxprEqn, jaxpr: Any, names: Sequence[str], sizes: Sequence[int]) -> dict:
    """A call's parameters for another jaxpr; what they say of one place holds for several now."""
    params = {**call.params, "jaxpr": jaxpr}
    for name in names:
        if name in params:
            pairs = zip(params[name], sizes, strict=True)
            params[name] = tuple(value for value, size in pairs for _ in range(size))
    return params


def _returning(jaxpr: Jaxpr, taken: dict[int, Residual]) -> Jaxpr:
    """Chunks in the place of what was made of them."""
    outvars = []
    for place, var in enumerate(jaxpr.outvars):
        outvars += jax.tree.leaves(taken[place].chunks) if place in taken else [var]
    wholes = {residual.whole for residual in taken.values()}
    equations = [equation for equation in jaxpr.eqns if wholes.isdisjoint(equation.outvars)]
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _with_chunks(closed: Any, places: dict[int, Residual]) -> tuple[Any, set[int]]:
    """A jaxpr whose matmuls take chunks, and the arguments that it has in chunks."""
    accepted = set()
    for place, residual in sorted(places.items(), reverse=True):
        jaxpr = _taking(closed.jaxpr, place, residual)
        if jaxpr is not None:
            closed = closed.replace(jaxpr=jaxpr)
            accepted.add(place)
    return closed, accepted


def _taking(jaxpr: Jaxpr, place: int, residual: Residual) -> Jaxpr | None:
    """The same with one more argument in chunks; None if something needs it whole."""
    graph, match, whole = Graph(jaxpr), residual.match, jaxpr.invars[place]
    between: list[int] = []
    uses: list[Use] = []
    for use in uses_of(graph, whole, match.view, match.collective.devices, between):
        if isinstance(use, str) or not use.sums_rows or use.view != match.uses[0].view:
            return None
        uses.append(use)
    if not uses:
        return None
    first, *others = launches_of(graph, uses, fixed=())
    launches = tied(graph, first), *others
    equations, sums = _tied_sums(graph, launches[0].tied)
    handle, types = Handle(place), jax.tree.map(type_of, residual.chunks)
    chunks = jax.tree.map(Var, types)
    replacements = launched(launches, handle, sums)
    consumed = consumed_by(graph, between, uses)
    placed = Placed(match, consumed, first.position, launches=launches)
    tracing = trace(replacements, {handle: types})
    like = graph.equations[first.position]
    site = put_in_place(placed, replacements, tracing, like, {handle: chunks})
    invars = [*jaxpr.invars[:place], *jax.tree.leaves(chunks), *jaxpr.invars[place + 1 :]]
    return splice(graph, equations, [site]).replace(invars=invars)


def _tied_sums(graph: Graph, index: int | None) -> tuple[list[JaxprEqn], dict]:
    """The equations, with a variable of its own for a sum's result until its launch is done too."""
    equations = list(graph.equations)
    if index is None:
        return equations, {}
    (read,) = equations[index].outvars
    summed = Var(type_of(read))
    equations[index] = equations[index].replace(outvars=[summed])
    return equations, {index: ([summed], [read])}
