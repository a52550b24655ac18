"""Puts new equations in the place of those that sites replace; all others stay as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from collective_matmul.dispatch.selection import Decision, record_decisions
from collective_matmul.rewrite.graph import Atom, Graph, type_of
from collective_matmul.rewrite.replacements import Handle, Replacement
from collective_matmul.rewrite.report import NAME
from collective_matmul.rewrite.site_selection import Placed


@dataclass(frozen=True)
class Tracing:
    """What takes the place of any site of one kind.

    Attributes:
      jaxprs: one for each replacement.
      trees: for each, the pytrees of its results.
      decisions: taken on the way.
    """

    jaxprs: tuple[Jaxpr, ...]
    trees: tuple[tuple[Any, ...], ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class TracedSite:
    """A site's new equations, by the position at which they come, and what they decided.

    Attributes:
      kept: what was gathered, its variables in a `GatherResidual`; None if it is not kept.
    """

    placed: Placed
    equations: dict[int, list[JaxprEqn]]
    renamed: dict[Var, Atom]
    decisions: tuple[Decision, ...]
    kept: Any


def trace(replacements: Sequence[Replacement], kept: dict[Handle, Any] | None = None) -> Tracing:
    """Traces replacements, within the shard_map that their site stands in.

    Each is one call: equal sites share its jaxpr, whose gradients and lowering JAX makes once.
    `kept` are the types of what an earlier site gathered.
    """
    kept = {**(kept or {})}
    jaxprs, trees = [], []
    with record_decisions(hidden=True) as decisions:
        for replacement in replacements:
            arguments = [
                kept[item] if isinstance(item, Handle) else type_of(item)
                for item in replacement.inputs
            ]
            closed, shapes = jax.make_jaxpr(jax.jit(replacement.fun), return_shape=True)(*arguments)
            assert not closed.consts, "what replaces a site has scalar constants alone"
            jaxprs.append(closed.jaxpr)
            trees.append(tuple(map(jax.tree.structure, shapes)))
            types = map(type_of, closed.jaxpr.outvars)
            for item, tree in zip(replacement.outputs, trees[-1], strict=True):
                made = jax.tree.unflatten(tree, [next(types) for _ in range(tree.num_leaves)])
                if isinstance(item, Handle):
                    kept[item] = made
    return Tracing(tuple(jaxprs), tuple(trees), tuple(decisions))


def put_in_place(
    placed: Placed,
    replacements: Sequence[Replacement],
    tracing: Tracing,
    like: JaxprEqn,
    kept: dict[Handle, Any] | None = None,
) -> TracedSite:
    """The new equations of a site, said to come from where `like` comes from.

    `kept` are the variables of what an earlier site gathered.
    """
    source = like.source_info.replace(name_stack=like.source_info.name_stack.extend(NAME))
    kept = {**(kept or {})}
    renamed: dict[Var, Atom] = {}
    equations: dict[int, list[JaxprEqn]] = {}
    for replacement, jaxpr, trees in zip(replacements, tracing.jaxprs, tracing.trees, strict=True):
        atoms = [
            atom for item in replacement.inputs for atom in jax.tree.leaves(kept.get(item, item))
        ]
        new, results = _renewed(jaxpr, atoms, source)
        where = placed.position if replacement.position is None else replacement.position
        equations.setdefault(where, []).extend(new)
        made = iter(results)
        for item, tree in zip(replacement.outputs, trees, strict=True):
            leaves = [next(made) for _ in range(tree.num_leaves)]
            if isinstance(item, Handle):
                kept[item] = jax.tree.unflatten(tree, leaves)
            else:
                (renamed[item],) = leaves
    gathered = next(iter(kept.values()), None)
    return TracedSite(placed, equations, renamed, tracing.decisions, gathered)


def _renewed(jaxpr: Jaxpr, atoms: Sequence[Atom], source: Any) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations and results of a jaxpr with new variables, reading `atoms`."""
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, atoms, strict=True))
    equations = []
    for equation in jaxpr.eqns:
        invars = _rename(equation.invars, names)
        outvars = [v if isinstance(v, DropVar) else Var(type_of(v)) for v in equation.outvars]
        names.update(zip(equation.outvars, outvars, strict=True))
        equations.append(equation.replace(invars=invars, outvars=outvars, source_info=source))
    return equations, _rename(jaxpr.outvars, names)


def splice(graph: Graph, equations: Sequence[JaxprEqn], sites: Sequence[TracedSite]) -> Jaxpr:
    """The jaxpr with `equations` for its own, but for those that sites replace."""
    names: dict[Var, Atom] = {}
    new: dict[int, list[JaxprEqn]] = defaultdict(list)
    for site in sites:
        names |= site.renamed
        for position, made in site.equations.items():
            new[position] += made
    old = list(equations)
    for index in {index for var in names for index in graph.users(var)}:
        old[index] = _reading(old[index], names)
    placed = [site.placed for site in sites]
    moved, waiting = _moved(placed), _waiting(placed)
    result: list[JaxprEqn] = []
    done = {index for site in placed for index in site.consumed}.union(*waiting.values())
    for index in range(len(old) + 1):
        if index in moved:
            before = [i for i in moved[index] if i not in done]
            result += map(old.__getitem__, before)
            done.update(before)
        if index in new:
            result += (_reading(made, names) for made in new[index])
        if index in waiting:
            result += map(old.__getitem__, waiting[index])
        if index < len(old) and index not in done:
            result.append(old[index])
    jaxpr = graph.jaxpr
    effects = frozenset(jaxpr.effects).union(*(equation.effects for equation in result))
    return jaxpr.replace(eqns=result, outvars=_rename(jaxpr.outvars, names), effects=effects)


def _moved(placed: Sequence[Placed]) -> dict[int, list[int]]:
    """By index, the equations that come before it and before what takes its place."""
    moved: dict[int, set[int]] = defaultdict(set)
    for site in placed:
        moved[site.position].update(site.moved)
    return {index: sorted(found) for index, found in moved.items()}


def _waiting(placed: Sequence[Placed]) -> dict[int, list[int]]:
    """By index, the equations that come before it and after what takes its place."""
    last: dict[int, int] = {}
    for launch in (launch for site in placed for launch in site.launches):
        for index in launch.put_off:
            last[index] = max(launch.ready, last.get(index, 0))
    waiting: dict[int, list[int]] = defaultdict(list)
    for index in sorted(last):
        waiting[last[index]].append(index)
    return waiting


def _reading(equation: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
    return equation.replace(invars=_rename(equation.invars, names))


def _rename(atoms: Sequence[Atom], names: dict[Var, Atom]) -> list[Atom]:
    renamed = []
    for atom in atoms:
        while not isinstance(atom, Literal) and atom in names:
            atom = names[atom]
        renamed.append(atom)
    return renamed
