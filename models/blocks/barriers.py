"""Barriers that bound when XLA gathers weights and sums gradients."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from models.parameters.use import Tree


def tied(x: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """Ties activations and the matrices of a tree: each waits for the other.

    A barrier binds only values that are used after it: use both results. Vectors are left alone,
    since they are small and their sums may be collected.
    """
    leaves, structure = jax.tree.flatten(tree)
    kind = _type_of(x)
    # In jax 0.10, a barrier would give all the same type.
    places = [
        place
        for place, leaf in enumerate(leaves)
        if leaf.ndim > 1
        and (jax.__version_info__ >= (0, 11) or jax.typeof(leaf).manual_axis_type == kind)
    ]
    x, waiting = lax.optimization_barrier((x, [leaves[place] for place in places]))
    for place, leaf in zip(places, waiting, strict=True):
        leaves[place] = leaf
    return x, jax.tree.unflatten(structure, leaves)


def varying_axes(x: Tree) -> frozenset[str]:
    """The mesh axes over which activations between blocks vary."""
    return _type_of(x).varying


def _type_of(x: Tree) -> Any:
    return jax.typeof(jax.tree.leaves(x)[0]).manual_axis_type
