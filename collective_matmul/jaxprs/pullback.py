"""Splits a function and its pullback, so that nothing made of weights alone is kept between them.

`jax.vjp` keeps views, casts and copies in 8 bits of weights beside activations. `jax.checkpoint`
cannot tell them apart: its policy sees single operations and not what their operands are made of.
Around a whole function, the policy also replaces those of parts inside, such as norms, which would
then keep all their intermediate values. `split_pullback` follows in the jaxpr what depends on
weights alone. The backward computes this again, from weights that it is given, and nothing else: no
collective and no kernel that communicates is executed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from collective_matmul.jaxprs.bodies import called
from collective_matmul.jaxprs.propagation import Propagation
from collective_matmul.jaxprs.walks import Scope

_CALLS = ("jit", "pjit")

Tree = Any


class SplitPullback(NamedTuple):
    """A function and its pullback, in two programs that share no array made of weights alone.

    Attributes:
      forward: ``(weights, x, *others) -> (y, kept)``. `kept` is a list of arrays, each of which
        depends on x or others.
      backward: ``(weights, kept, dy) -> (d_weights, dx)``, as the pullback of `jax.vjp` returns
        them. The weights have the values that the forward had.
    """

    forward: Callable[..., tuple[Tree, list[jax.Array]]]
    backward: Callable[..., tuple[Tree, Tree]]


def split_pullback(
    fun: Callable[..., Tree], weights: Tree, x: Tree, *others: Tree
) -> SplitPullback:
    """Traces a function and its pullback with respect to weights and x.

    Args:
      fun: ``fun(weights, x, *others) -> y``. Its parts in `jax.checkpoint` keep what their own
        policies say.
      weights: a pytree of arrays; shapes, dtypes and varying mesh axes are those of all calls.
      x: a pytree of arrays, likewise.
      *others: pytrees of arrays that are not differentiated.

    Returns:
      Both programs. Arrays that `fun` closes over count as others.
    """

    def both(weights: Tree, x: Tree, *others: Tree) -> Any:
        return jax.vjp(lambda weights, x: fun(weights, x, *others), weights, x)

    arguments = (weights, x, *others)
    closed, (y, pullback) = jax.make_jaxpr(both, return_shape=True)(*arguments)
    closed = jax.make_jaxpr(_without_calls(closed))(*jax.tree.leaves(arguments))
    jaxpr, of_y, structure = closed.jaxpr, jax.tree.structure(y), jax.tree.structure(pullback)
    results, residuals = jaxpr.outvars[: of_y.num_leaves], jaxpr.outvars[of_y.num_leaves :]
    own = jaxpr.invars[: len(jax.tree.leaves(weights))]
    dependent = dependents(jaxpr, [*jaxpr.constvars, *jaxpr.invars[len(own) :]])
    kept = list(dict.fromkeys(v for v in residuals if isinstance(v, Var) and v in dependent))
    remade = [v for v in residuals if not isinstance(v, Var) or v not in dependent]
    first = jaxpr_as_fun(closed.replace(jaxpr=jaxpr.replace(outvars=[*results, *kept])))
    again = jaxpr_as_fun(
        ClosedJaxpr(
            jaxpr.replace(
                constvars=[], invars=own, outvars=remade, eqns=_needed(jaxpr, remade, dependent)
            ),
            [],
        )
    )

    def forward(*arguments: Tree) -> tuple[Tree, list[jax.Array]]:
        values = first(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(of_y, values[: len(results)]), values[len(results) :]

    def backward(weights: Tree, saved: Sequence[jax.Array], dy: Tree) -> tuple[Tree, Tree]:
        values = dict(zip(kept, saved, strict=True))
        made = iter(again(*jax.tree.leaves(weights)))
        leaves = [
            values[v] if isinstance(v, Var) and v in dependent else next(made) for v in residuals
        ]
        return jax.tree.unflatten(structure, leaves)(dy)

    return SplitPullback(forward, backward)


def dependents(jaxpr: Jaxpr, sources: Iterable[Var]) -> set[Var]:
    """Finds the variables of a jaxpr that depend on any of `sources`, these included.

    It follows jitted functions, scans, and each operand of a barrier by itself. Each result of
    another equation depends on all its operands.
    """
    labels = _Dependents().variables(jaxpr, dict.fromkeys(sources, frozenset({True})))
    return {variable for variable, marks in labels.items() if marks}


class _Dependents(Propagation):
    """Marks what depends on marked values. What a scan starts with is read by it."""

    entered = frozenset({*_CALLS, "scan"})
    reads_initial = True

    def of_equation(self, equation: JaxprEqn, operands: Sequence[frozenset]) -> Sequence[frozenset]:
        if equation.primitive.name == "optimization_barrier":
            return operands
        return super().of_equation(equation, operands)


def _without_calls(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Evaluates a jaxpr, and the equations of jitted functions inside it one by one.

    A call may return both what depends on weights alone and what does not.
    """
    jaxpr = closed.jaxpr

    def execute(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        if equation.primitive.name in _CALLS:
            return _without_calls(called(equation))(*operands)
        pairs = zip(equation.invars, operands, strict=True)
        read = {v: value for v, value in pairs if isinstance(v, Var)}
        alone = jaxpr.replace(
            constvars=[], invars=[*read], outvars=equation.outvars, eqns=[equation]
        )
        return jaxpr_as_fun(ClosedJaxpr(alone, []))(*read.values())

    def evaluate(*arguments: Any) -> list[Any]:
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        scope = Scope(jaxpr, arguments, lambda v: v.val if isinstance(v, Literal) else constants[v])
        return scope.run(execute)

    return evaluate


def _needed(jaxpr: Jaxpr, results: Sequence[Var | Literal], without: set[Var]) -> list[Any]:
    """The equations that results need which do not depend on the variables `without`."""
    needed = {v for v in results if isinstance(v, Var)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if any(v in needed for v in equation.outvars) and without.isdisjoint(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, Var))
            equations.append(equation)
    return equations[::-1]
