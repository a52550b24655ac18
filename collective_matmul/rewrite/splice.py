"""Puts new equations in the place of those that sites replace; all others stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from collective_matmul.choose.decision import Decision, record_decisions
from collective_matmul.rewrite.graph import Atom
from collective_matmul.rewrite.plan import Placed
from collective_matmul.rewrite.report import NAME
from collective_matmul.rewrite.sites import Handle, Replacement


@dataclass(frozen=True)
class TracedSite:
    """A site's new equations, by the position at which they come, and what they decided."""

    placed: Placed
    equations: dict[int, list[JaxprEqn]]
    renamed: dict[Var, Atom]
    decision: Decision


def trace_site(placed: Placed, replacements: Sequence[Replacement], like: JaxprEqn) -> TracedSite:
    """Traces what takes a site's place, within the shard_map that it stands in.

    The new equations are said to come from where `like` comes from.
    """
    tracer = _Tracer(like)
    with record_decisions() as decisions:
        for replacement in replacements:
            tracer.trace(replacement, placed.position)
    return TracedSite(placed, tracer.equations, tracer.renamed, decisions[0])


class _Tracer:
    def __init__(self, like: JaxprEqn):
        self.equations: dict[int, list[JaxprEqn]] = {}
        self.renamed: dict[Var, Atom] = {}
        source = like.source_info
        self._source = source.replace(name_stack=source.name_stack.extend(NAME))
        self._kept: dict[Handle, tuple[Any, list[Atom]]] = {}

    def trace(self, replacement: Replacement, position: int) -> None:
        """Traces one replacement; its results are what its last equations make."""
        atoms, arguments = [], []
        for item in replacement.inputs:
            treedef, leaves = self._kept.get(item, (None, [item]))
            avals = [leaf.aval for leaf in leaves]
            arguments.append(avals[0] if treedef is None else jax.tree.unflatten(treedef, avals))
            atoms += leaves
        closed, shapes = jax.make_jaxpr(replacement.fun, return_shape=True)(*arguments)
        names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, atoms, strict=True))
        equations = [self._renamed(equation, names) for equation in closed.jaxpr.eqns]
        where = position if replacement.position is None else replacement.position
        self.equations.setdefault(where, []).extend(equations)
        results = iter(_rename(closed.jaxpr.outvars, names))
        for item, shape in zip(replacement.outputs, shapes, strict=True):
            leaves, treedef = jax.tree.flatten(shape)
            made = [next(results) for _ in leaves]
            if isinstance(item, Handle):
                self._kept[item] = treedef, made
            else:
                (self.renamed[item],) = made

    def _renamed(self, equation: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
        return equation.replace(invars=_rename(equation.invars, names), source_info=self._source)


def splice(jaxpr: Jaxpr, equations: Sequence[JaxprEqn], sites: Sequence[TracedSite]) -> Jaxpr:
    """The jaxpr with `equations` for its own, but for those that sites replace."""
    consumed = frozenset[int]().union(*(site.placed.consumed for site in sites))
    names: dict[Var, Atom] = {}
    for site in sites:
        names |= site.renamed
    result: list[JaxprEqn] = []
    done: set[int] = set()

    def put(index: int) -> None:
        if index not in consumed and index not in done:
            done.add(index)
            result.append(_reading(equations[index], names))

    for index in range(len(equations)):
        for site in sites:
            if site.placed.position == index:
                for moved in site.placed.moved:
                    put(moved)
            result += [_reading(new, names) for new in site.equations.get(index, ())]
        put(index)
    effects = frozenset(jaxpr.effects).union(*(equation.effects for equation in result))
    return jaxpr.replace(eqns=result, outvars=_rename(jaxpr.outvars, names), effects=effects)


def _reading(equation: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
    invars = _rename(equation.invars, names)
    return equation.replace(invars=invars) if invars != list(equation.invars) else equation


def _rename(atoms: Sequence[Atom], names: dict[Var, Atom]) -> list[Atom]:
    renamed = []
    for atom in atoms:
        while not isinstance(atom, Literal) and atom in names:
            atom = names[atom]
        renamed.append(atom)
    return renamed
