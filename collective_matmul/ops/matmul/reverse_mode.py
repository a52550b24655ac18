"""`jax.custom_vjp` for the ops, which define reverse mode alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


class ReverseMode(jax.custom_vjp):
    """`jax.custom_vjp` with a helpful error for forward-mode differentiation.

    JAX explains it only for programs that it compiles; otherwise it reports an unhashable argument.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; raises TypeError in forward mode."""
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            if not any(text in str(error) for text in ("forward-mode", "'Unhashable'")):
                raise
            raise TypeError(
                "forward-mode differentiation of a collective matmul, as by jax.jvp, jax.jacfwd or"
                " jax.hessian: the ops define reverse mode alone; use jax.vjp, jax.grad or"
                " jax.jacrev"
            ) from error


def undifferentiated(fun: Callable, reason: str) -> Callable:
    """The function, which raises TypeError with this reason where it is differentiated.

    Applied to the forward and backward rules of an op, it rejects second derivatives.
    """
    guarded = jax.custom_jvp(lambda x: x)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise TypeError(reason)

    @functools.wraps(fun)
    def wrapped(*args: Any) -> Any:
        return fun(*jax.tree.map(lambda x: guarded(x) if isinstance(x, jax.Array) else x, args))

    return wrapped
