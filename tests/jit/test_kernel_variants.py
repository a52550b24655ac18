"""`overlap_jit` with kernels that address peers: only the variant with their options has them.

Programs are traced for H200 GPUs, and do not run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import AbstractMesh, AxisType

from collective_matmul import log, overlap_jit
from collective_matmul.dispatch import selection
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.jit import compiler, peer_decision
from collective_matmul.jit.deciding_function import WrongVariantError, deciding
from tests.dispatch.sites import BFLOAT16, H200
from tests.explained import arguments, gram, on
from tests.hopper import needs_kernels
from tests.reference import AXIS

SHAPES = arguments(64, 4096, 14336, dtype=BFLOAT16)
pytestmark = needs_kernels


def stack(**options: Any) -> Callable:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    return on(mesh, **options)


def variants(fun: Callable) -> tuple[Callable, Callable]:
    """Traces as the calls of both variants do, without and with kernels that address peers."""
    compiled = overlap_jit(fun)

    def trace(variant: Any) -> str:
        with deciding():
            return str(compiled._use(variant, lambda jitted: jitted.trace(*SHAPES)).jaxpr)

    return (
        functools.partial(trace, compiled._default),
        functools.partial(trace, compiled._with_peer_kernels),
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_kernels_are_in_programs_with_their_options_only(allowed: bool) -> None:
    few = stack()
    fun = few if allowed else lambda *args: gram(few(*args))
    without, with_them = variants(fun)
    with pytest.raises(WrongVariantError):
        (without if allowed else with_them)()
    if allowed:
        assert "device_constant" in with_them()
    else:
        assert "device_constant" not in without()
    assert "device_constant" not in str(overlap_jit(fun).trace(*SHAPES).jaxpr)
    assert "device_constant" in str(overlap_jit(fun, peer_kernels=True).trace(*SHAPES).jaxpr)


@pytest.mark.parametrize("allowed", [False, True])
def test_only_decisions_for_the_program_that_runs_are_recorded(allowed: bool) -> None:
    few = stack()
    without, with_them = variants(few if allowed else lambda *args: gram(few(*args)))
    with record_decisions() as decisions:
        for trace in (with_them, without):
            with contextlib.suppress(WrongVariantError):
                trace()
    assert len(decisions) == 4
    assert {each.implementation == "one_shot" for each in decisions} == {allowed}


@pytest.mark.parametrize("use", ["refused", "allowed", "trace"])
def test_fallbacks_are_warned_of_when_it_is_decided(
    use: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once = functools.cache(log.warn_once.__wrapped__)
    for module in (selection, peer_decision):
        monkeypatch.setattr(module, "warn_once", warn_once)
    asked = stack(implementation=("one_shot", "ring"))
    fun = asked if use == "allowed" else lambda *args: gram(asked(*args))
    if use == "trace":
        overlap_jit(fun).trace(*SHAPES)
    else:
        variants(fun)[use == "allowed"]()
    reason = "the compiler divides dot_general" if use == "refused" else compiler.COMPILED_BY_HAND
    fallback = (
        "one_shot is not possible: overlap_jit has not allowed this program kernels that address"
    )
    if use == "allowed":
        assert caplog.messages == []
    else:
        assert len(caplog.messages) == 2
        for message, op in zip(caplog.messages, ("all_gather", "matmul_reduce"), strict=True):
            assert message.startswith(op) and fallback in message and reason in message
