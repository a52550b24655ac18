"""The forward and backward rules of functions with custom gradients, rewritten when they are used.

Of a `custom_vjp`, a jaxpr holds the rules as functions yet to be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

Rewrite = Callable[[Any], Any]


def rewritten_rules(equation: JaxprEqn, rewrite: Rewrite) -> dict[str, Any]:
    """The parameters of a `custom_vjp_call` whose rules are rewritten.

    Args:
      equation: the call.
      rewrite: from jaxpr to jaxpr, where the rules are carried out.
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
    """Of the arguments and results, zeros may be symbolic: only arrays are traced."""
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
