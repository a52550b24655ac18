"""Barriers that bound when XLA gathers weights and sums gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

from models.parameters.use import Tree


def tied(x: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """Ties activations and the matrices of a tree: each waits for the other.

    A barrier binds only values that are used after it: use both results. Vectors are left alone,
    since they are small and their sums may be collected.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if leaf.ndim > 1]
    x, waiting = barrier((x, [leaves[place] for place in places]))
    for place, leaf in zip(places, waiting, strict=True):
        leaves[place] = leaf
    return x, jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def tied_in_backward(x: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """The arguments, whose gradients are tied: use both results.

    All of them are differentiated from here on, so the tree has no parameters that are frozen.
    """
    return x, tree


def _untied(x: Tree, tree: Tree) -> tuple[tuple[Tree, Tree], None]:
    return (x, tree), None


def _tied_gradients(_: None, gradients: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    return tied(*gradients)


tied_in_backward.defvjp(_untied, _tied_gradients)


def barrier(tree: Tree) -> Tree:
    """`lax.optimization_barrier`, after which arrays have the types that they had before."""
    if jax.__version_info__ >= (0, 11):
        return lax.optimization_barrier(tree)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _barrier.bind(*leaves))


def varying_axes(x: Tree) -> frozenset[str]:
    """The mesh axes over which activations between blocks vary."""
    return _type_of(x).varying


def _type_of(x: Tree) -> Any:
    return jax.typeof(jax.tree.leaves(x)[0]).manual_axis_type


# In jax 0.10, `lax.optimization_barrier` gives all arrays the type of those that vary over most
# axes, so that a gradient that was summed would have to be summed again.
_barrier = Primitive("optimization_barrier")
_barrier.multiple_results = True


@_barrier.def_abstract_eval
def _(*types: Any) -> Sequence[Any]:
    return types


@_barrier.def_impl
def _(*values: Any) -> Sequence[Any]:
    return values  # Outside of `jax.jit` each operation waits for those before it.


def _lowered(context: Any, *values: Any) -> Sequence[Any]:
    del context
    return stablehlo.OptimizationBarrierOp(values).results


mlir.register_lowering(_barrier, _lowered)
