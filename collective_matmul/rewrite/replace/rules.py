"""Rewrites the forward and backward rules of functions with custom gradients.

The jaxpr of a `custom_vjp` holds its rules as functions that are not traced yet. They are rewritten
when JAX traces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

Rewrite = Callable[[Any], Any]


def rewritten_rules(equation: JaxprEqn, rewrite: Rewrite) -> dict[str, Any]:
    """The parameters of a `custom_vjp_call` that hold rules, with the rules rewritten.

    Args:
      equation: the call.
      rewrite: rewrites a jaxpr; called inside the trace of a rule.
    """
    forward, backward = (equation.params[name] for name in ("fwd_jaxpr_thunk", "bwd"))
    return {
        "fwd_jaxpr_thunk": forward.wrap(_forward, (rewrite,), None),
        "bwd": backward.wrap(_backward, (rewrite,), None),
    }


def _forward(rule: Callable, rewrite: Rewrite, *args: Any) -> Any:
    jaxpr, *rest = rule(*args)
    return rewrite(jaxpr), *rest


def _backward(rule: Callable, rewrite: Rewrite, *args: Any) -> Any:
    """Traces and rewrites a backward rule. Zeros may be symbolic: only arrays are traced."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, jax.Array)]
    result: list[Any] = []

    def traced(*arrays: jax.Array) -> list[jax.Array]:
        filled = list(args)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        result[:] = jax.tree.flatten(rule(*filled), is_leaf=lambda leaf: leaf is None)
        return [leaf for leaf in result[0] if isinstance(leaf, jax.Array)]

    arrays = [args[place] for place in places]
    program = rewrite(jax.make_jaxpr(traced)(*arrays))
    made = iter(jaxpr_as_fun(program)(*arrays))
    leaves, treedef = result
    filled = [next(made) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.tree.unflatten(treedef, filled)
