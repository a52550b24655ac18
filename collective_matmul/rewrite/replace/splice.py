"""Inserts the replacements of sites into a jaxpr. All other equations stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from collective_matmul.dispatch.recording import Decision, record_decisions
from collective_matmul.explicit_axes import with_type_of
from collective_matmul.jaxprs.dependencies import spliced
from collective_matmul.jaxprs.graph import Atom, Graph, copied, renamed, type_of, variables
from collective_matmul.rewrite.find.report import NAME
from collective_matmul.rewrite.match.site_order import PlacedMatch
from collective_matmul.rewrite.replace.replacements import Replacement, ResidualRef


@dataclass(frozen=True)
class TracedReplacements:
    """The replacements of one site, traced; equal sites share them.

    Attributes:
      jaxprs: one for each replacement.
      trees: for each replacement, the pytrees of its results.
      decisions: decisions recorded while tracing.
    """

    jaxprs: tuple[Jaxpr, ...]
    trees: tuple[tuple[Any, ...], ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class TracedSite:
    """A site with its new equations.

    Attributes:
      placed: the site.
      equations: the new equations of each replacement, with the index before which they come.
      renamed: what the site's results are now.
      decisions: decisions recorded while tracing.
      kept: the gathered array as variables, in the pytree of a `ResidualRef`; None if it is not
        kept.
    """

    placed: PlacedMatch
    equations: list[tuple[int, list[JaxprEqn]]]
    renamed: dict[Var, Atom]
    decisions: tuple[Decision, ...]
    kept: Any


def trace(
    replacements: Sequence[Replacement], kept: dict[ResidualRef, Any] | None = None
) -> TracedReplacements:
    """Traces replacements. Call it inside the shard_map of their site.

    Each replacement is one call. Equal sites share its jaxpr, so JAX differentiates and lowers it
    once.

    Args:
      replacements: the replacements of one site.
      kept: types of what another site gathered.
    """
    kept = {**(kept or {})}
    jaxprs, trees = [], []
    with record_decisions(hidden=True) as decisions:
        for replacement in replacements:
            arguments = [
                kept[item] if isinstance(item, ResidualRef) else type_of(item)
                for item in replacement.inputs
            ]
            closed, shapes = jax.make_jaxpr(_typed(replacement), return_shape=True)(*arguments)
            assert not closed.consts, "replacements have no constants other than scalars"
            jaxprs.append(closed.jaxpr)
            trees.append(tuple(map(jax.tree.structure, shapes)))
            types = map(type_of, closed.jaxpr.outvars)
            for item, tree in zip(replacement.outputs, trees[-1], strict=True):
                made = jax.tree.unflatten(tree, [next(types) for _ in range(tree.num_leaves)])
                if isinstance(item, ResidualRef):
                    kept[item] = made
    return TracedReplacements(tuple(jaxprs), tuple(trees), tuple(decisions))


def inside_shard_map(parameters: dict[str, Any], fun: Callable[[], Any]) -> Any:
    """Calls a function as in the body of a shard_map with these parameters."""
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


def _typed(replacement: Replacement) -> Callable[..., tuple]:
    """A replacement as one call, its results sharded over explicit mesh axes as the program's."""

    @jax.jit
    @functools.wraps(replacement.fun)
    def fun(*arguments: Any) -> tuple:
        return tuple(
            result if isinstance(item, ResidualRef) else with_type_of(item.aval, result)
            for item, result in zip(replacement.outputs, replacement.fun(*arguments), strict=True)
        )

    return fun


def instantiate(
    placed: PlacedMatch,
    replacements: Sequence[Replacement],
    tracing: TracedReplacements,
    like: JaxprEqn,
    kept: dict[ResidualRef, Any] | None = None,
) -> TracedSite:
    """The new equations of a site.

    Args:
      placed: the site.
      replacements: its replacements.
      tracing: the replacements, traced for this site or an equal one.
      like: the equation whose source information the new ones get.
      kept: variables of what another site gathered.
    """
    source = like.source_info.replace(name_stack=like.source_info.name_stack.extend(NAME))
    kept = {**(kept or {})}
    renamed: dict[Var, Atom] = {}
    equations: list[tuple[int, list[JaxprEqn]]] = []
    for replacement, jaxpr, trees in zip(replacements, tracing.jaxprs, tracing.trees, strict=True):
        atoms = [
            atom for item in replacement.inputs for atom in jax.tree.leaves(kept.get(item, item))
        ]
        new, results = copied(jaxpr, atoms, lambda _: source)
        position = placed.position if replacement.position is None else replacement.position
        equations.append((position, new))
        made = iter(results)
        for item, tree in zip(replacement.outputs, trees, strict=True):
            leaves = [next(made) for _ in range(tree.num_leaves)]
            if isinstance(item, ResidualRef):
                kept[item] = jax.tree.unflatten(tree, leaves)
            else:
                (renamed[item],) = leaves
    gathered = next(iter(kept.values()), None)
    return TracedSite(placed, equations, renamed, tracing.decisions, gathered)


def splice(graph: Graph, equations: Sequence[JaxprEqn], sites: Sequence[TracedSite]) -> Jaxpr:
    """The jaxpr with `equations` in place of its own, and the sites' replacements inserted."""
    names: dict[Var, Atom] = {}
    for site in sites:
        names |= site.renamed
    consumed = executed_by(graph, sites)
    jaxpr = spliced(
        graph.jaxpr,
        (
            (i, _reading(equation, names))
            for i, equation in enumerate(equations)
            if i not in consumed
        ),
        (
            (position, [_reading(equation, names) for equation in made])
            for site in sites
            for position, made in site.equations
        ),
    )
    return jaxpr.replace(outvars=renamed(jaxpr.outvars, names))


def executed_by(graph: Graph, sites: Sequence[TracedSite]) -> frozenset[int]:
    """The equations of a jaxpr that sites replace, and gathers of weights that only they need."""
    consumed = frozenset().union(*(site.placed.consumed for site in sites))
    gathers = (i for site in sites for weight in site.placed.weights for i in weight.chain)
    # A site that cannot gather its weight, such as an all-reduce, reads what the program gathers.
    made = (equation for site in sites for _, new in site.equations for equation in new)
    read = {var for equation in made for var in variables(equation.invars)}
    return consumed | graph.unneeded(gathers, consumed, read)


def _reading(equation: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
    """The equation, reading what its operands are now; the same object if nothing changes."""
    if not any(map(names.__contains__, variables(equation.invars))):
        return equation
    return equation.replace(invars=renamed(equation.invars, names))
