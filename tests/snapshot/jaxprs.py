"""The primitives in the jaxprs of all ops, for CPUs and for described H200."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from collective_matmul.peer_access import peer_kernels_allowed
from tests.snapshot.calls import FORMS, Call, Program, calls
from tests.snapshot.jaxpr_summary import summary
from tests.snapshot.library import H200, IMPLEMENTATIONS, PORTABLE, error_text
from tests.snapshot.programs import (
    decided_programs,
    einsum_programs,
    explicit_programs,
    overlap_programs,
)

_FIRST_FORM, *_OTHER_FORMS = FORMS


def snapshot() -> dict[str, Any]:
    """The summary of each program by its name, or the error that it raises."""
    entries = {}
    for name, make, allowed in _programs():
        assert name not in entries, name
        entries[name] = _summary(make, allowed)
    return entries


def _summary(make: Callable[[], Program], allowed: bool | None) -> dict[str, Any]:
    """The summary of a program whose kernels may address peers, or None if that is not set."""
    context = contextlib.nullcontext() if allowed is None else peer_kernels_allowed(allowed)
    try:
        with context:
            program = make()
            # What `overlap_jit` returns is traced by its own method.
            trace = getattr(program.fun, "trace", None) or jax.jit(program.fun).trace
            return summary(trace(*program.arguments).jaxpr)
    except (ValueError, TypeError, NotImplementedError) as error:
        return {"error": error_text(error)}


def _programs() -> Iterator[tuple[str, Callable[[], Program], bool | None]]:
    for device in (None, H200):
        kind = device.device_kind if device else "CPU"
        names = IMPLEMENTATIONS if device else PORTABLE
        others = (call for call in calls(names, _OTHER_FORMS) if call.direction == "vjp")
        for call in (*calls((*names, None), [_FIRST_FORM]), *others):
            yield f"{kind} | {call}", functools.partial(_program_of, call, device), True
        plain = [*overlap_programs(device), *explicit_programs(device)]
        for name, make in (*einsum_programs(names, device), *plain):
            yield f"{kind} | {name}", make, True
    for name, make in decided_programs(H200):
        yield f"{H200.device_kind} | {name}", make, None


def _program_of(call: Call, device: Any) -> Program:
    return call.program(call.abstract_mesh(device))
