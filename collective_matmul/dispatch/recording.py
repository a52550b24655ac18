"""Decisions, and a record of those that are taken while a program is traced."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from collective_matmul.site import Site


@dataclass(frozen=True)
class Decision:
    """The backend that executes a site, and why.

    Attributes:
      site: what is executed.
      implementation: the name of the backend.
      reason: in words.
      seconds: predicted for the backend, a weight gradient included; None if unknown.
      reference_seconds: the same for the reference, XLA's collectives.
    """

    site: Site
    implementation: str
    reason: str
    seconds: float | None = None
    reference_seconds: float | None = None


_recorders: contextvars.ContextVar[tuple[list[Decision], ...]] = contextvars.ContextVar(
    "recorders", default=()
)


# JAX traces again what it has traced before only if something that it looks at has changed.
_trace_number = jax.make_user_context(0)
_trace_numbers = itertools.count(1)


@contextlib.contextmanager
def record_decisions(*, hidden: bool = False) -> Iterator[list[Decision]]:
    """Collects every decision taken while tracing inside the block, in order.

    Tracing happens once per compiled shape: a function that `jax.jit` has already traced decides
    nothing again, unless `force_retrace` is active.

    Args:
      hidden: whether blocks around this one do not record them.
    """
    decisions: list[Decision] = []
    around = () if hidden else _recorders.get()
    token = _recorders.set((*around, decisions))
    try:
        yield decisions
    finally:
        _recorders.reset(token)


def record(decision: Decision) -> None:
    """Adds a decision to all records that are being taken."""
    for decisions in _recorders.get():
        decisions.append(decision)


def force_retrace() -> contextlib.AbstractContextManager:
    """A block in which `jax.jit` traces again what it has traced before it."""
    return _trace_number(next(_trace_numbers))


def decisions_of(fun: Callable, *args: Any, **kwargs: Any) -> list[Decision]:
    """All decisions for a function, which is traced for these arguments and not compiled."""
    with force_retrace(), record_decisions() as decisions:
        jax.eval_shape(fun, *args, **kwargs)
    return decisions
