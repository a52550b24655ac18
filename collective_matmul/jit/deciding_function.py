"""A function that, when `jax.jit` traces it, decides whether its kernels may address peers' memory.

`overlap_jit` compiles it twice: with the options that such kernels need, and without. It calls one
of both, which costs no Python of ours unless JAX has to trace the function. Only then the decision
is asked for, and `WrongVariantError` sends the caller to the other one.

An error while a jitted function is traced makes JAX's caches useless for these shapes. So it is
only raised in the variant that will never run them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from collective_matmul.dispatch.recording import record, record_decisions
from collective_matmul.jit.graph_functions import PureFunction, StaticArguments
from collective_matmul.jit.peer_decision import decide_once, warn_withheld
from collective_matmul.peer_access import UNDECIDED, peer_kernels_allowed


class WrongVariantError(Exception):
    """Raised while a function is traced, where the decision is for its other variant."""


_deciding = contextvars.ContextVar("deciding", default=False)


@contextlib.contextmanager
def deciding(value: bool = True) -> Iterator[None]:
    """Whether functions that are traced raise `WrongVariantError`. Else they trust their caller."""
    token = _deciding.set(value)
    try:
        yield
    finally:
        _deciding.reset(token)


class DecidingFunction:
    """A function for both variants. `peer_kernels_allowed` selects the variant to trace.

    Without kernels that address peers, it consists of the equations that were used for the
    decision: the user's code runs once for both.

    Args:
      fun: the function.
      static: its static arguments.
    """

    def __init__(self, fun: Callable, static: StaticArguments):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._static = fun, static
        self._undecided: Any = jax.jit(
            fun, static_argnums=static.positions, static_argnames=static.names, inline=True
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DecidingFunction:
        return deciding_function(copy.deepcopy(self._fun, memo), self._static)

    def __repr__(self) -> str:
        return repr(self._fun)

    def clear_cache(self) -> None:
        """Drops the traces from which was decided."""
        self._undecided.clear_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, or raises `WrongVariantError`."""
        has_peer_kernels = peer_kernels_allowed.value is True
        if _deciding.get() and self._may_have_peer_kernels(args, kwargs) != has_peer_kernels:
            raise WrongVariantError
        if has_peer_kernels:
            return self._fun(*args, **kwargs)
        return self._undecided(*args, **kwargs)

    def _may_have_peer_kernels(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        with (
            deciding(False),
            peer_kernels_allowed(UNDECIDED),
            record_decisions(hidden=True) as decisions,
        ):
            traced = self._undecided.trace(*args, **kwargs)
        decision = decide_once(traced.jaxpr.jaxpr)
        if not decision.allowed:
            for each in decisions:
                record(each)
            warn_withheld(decision.withheld, decision.reason)
        return decision.allowed


def deciding_function(fun: Callable, static: StaticArguments) -> DecidingFunction:
    """The `DecidingFunction` of a function, always the same, as JAX caches programs by identity."""
    if not isinstance(fun, PureFunction):
        return DecidingFunction(fun, static)
    if fun.deciding is None:
        fun.deciding = DecidingFunction(fun, static)
    return fun.deciding
