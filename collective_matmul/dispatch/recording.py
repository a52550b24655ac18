"""Decisions, and a record of the decisions while a program is traced."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class PeerAlternative:
    """A kernel that addresses peers' memory, which a site would get if its program may have any.

    Attributes:
      implementation: name of the backend.
      seconds_without: predicted time of what executes the site without it; 0 if unknown.
      seconds_gained: this time less that of the kernel; 0 if unknown.
      missed: the warning for a program without it: a better backend was not possible; or None.
    """

    implementation: str
    seconds_without: float
    seconds_gained: float
    missed: str | None = None


@dataclass(frozen=True)
class Decision:
    """The backend that executes a request, and why.

    Attributes:
      site: its request, of the class that the op has.
      implementation: name of the backend.
      reason: the reason, in words.
      seconds: predicted time of the backend, including a weight gradient; None if unknown.
      reference_seconds: predicted time of the reference, XLA's collectives; None if unknown.
      communication_seconds: predicted time of these collectives alone; None if unknown.
      peer_alternative: what would execute the site if the program may have kernels that address
        peers' memory; None where that is decided already, or changes nothing.
      peer_unsupported_reason: why such a kernel, though it should be faster, could not execute the
        site even then; or None.
      multiplied_dtypes: in which the backend multiplies x and w; None if they are the site's own.
      is_unmeasured: whether times are those of models, as nothing similar was measured.
      device_kind: JAX's name of the kind of device that it is for, which may be one that is not
        here: a mesh can describe it.
      automatic_axes: Auto axes, with their sizes, that may divide the site's arrays further.
    """

    site: Any
    implementation: str
    reason: str
    seconds: float | None = None
    reference_seconds: float | None = None
    communication_seconds: float | None = None
    peer_alternative: PeerAlternative | None = None
    peer_unsupported_reason: str | None = None
    multiplied_dtypes: tuple[str, str] | None = None
    is_unmeasured: bool = False
    device_kind: str = field(default="", compare=False)
    automatic_axes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def hidden_seconds(self) -> float:
        """The part of the communication that the backend hides; 0 if unknown."""
        if not (self.seconds and self.reference_seconds and self.communication_seconds):
            return 0.0
        return min(max(self.reference_seconds - self.seconds, 0.0), self.communication_seconds)


_recorders: contextvars.ContextVar[tuple[list[Decision], ...]] = contextvars.ContextVar(
    "recorders", default=()
)


# JAX traces a function again only if something in its cache key has changed, such as this number.
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
    """Adds a decision to all active records."""
    for decisions in _recorders.get():
        decisions.append(decision)


def force_retrace() -> contextlib.AbstractContextManager:
    """A context in which `jax.jit` traces functions again that it has already traced."""
    return _trace_number(next(_trace_numbers))


def decisions_of(fun: Callable, *args: Any, **kwargs: Any) -> list[Decision]:
    """The decisions for a function. It is traced for these arguments, and not compiled."""
    with force_retrace(), record_decisions() as decisions:
        jax.eval_shape(fun, *args, **kwargs)
    return decisions
