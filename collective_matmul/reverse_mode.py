"""`jax.custom_vjp` for the ops, which define reverse mode alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from collective_matmul.explicit_axes import specs_like, with_auto_axes


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

    def define_gradients(self, gradients: Callable, forward: Callable | None = None) -> None:
        """Defines the backward of an op that keeps only its operands for it.

        Args:
          gradients: ``gradients(*parameters, operands, cotangent)`` returns the gradients of the
            op's first two operands. Others have none. The last parameter is an `OpParams`.
          forward: ``forward(*args)`` returns the results, and what to keep of the first operand; by
            default that itself.
        """

        def keeping(*args: Any) -> Any:
            operands = [x for i, x in enumerate(args) if i not in self.nondiff_argnums]
            with args[self.nondiff_argnums[-1]].suppress_recording():
                if forward is None:
                    return self(*args), tuple(operands)
                results, operands[0] = forward(*args)
            return results, tuple(operands)

        def backward(*args: Any) -> Any:
            *parameters, operands, cotangent = args
            bound = functools.partial(gradients, *parameters)
            both = with_auto_axes(bound, lambda: specs_like(operands[:2]), operands, cotangent)
            return (*both, *(None for _ in operands[2:]))

        self.defvjp(keeping, backward)


def undifferentiated(fun: Callable, reason: str) -> Callable:
    """The function, which raises TypeError with this reason where it is differentiated itself.

    The forward and the backward of an op are, in the gradient of a gradient.
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
