"""The choice of the kernel for an attention: the one requested, or the fastest that was measured.

The measured times ship with the library (`collective_matmul.data`). A request takes the entry that
is most like it. On devices of which none were measured, kernels are tried in the order of
`KERNELS`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from collective_matmul import data
from collective_matmul.dispatch.selection import UnsupportedSiteError
from collective_matmul.hardware import traced_device
from collective_matmul.log import warn_once
from collective_matmul.ops.attention.cudnn_attention import CudnnAttention
from collective_matmul.ops.attention.flash_attention import FlashAttention3
from collective_matmul.ops.attention.kernel import AttentionKernel
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.xla_attention import XlaAttention

#: The name of the op.
OP = "dot_product_attention"
MEASURES = "attention"
#: All kernels by name, in the order in which they are tried where nothing was measured.
KERNELS: Mapping[str, AttentionKernel] = {
    kernel.name: kernel for kernel in (FlashAttention3(), CudnnAttention(), XlaAttention())
}
REFERENCE = XlaAttention.name

#: Kinds of device that have not been measured: one with the same chip.
DEVICE_ALIASES = {"NVIDIA H200": "NVIDIA H100 80GB HBM3"}

#: Kernels that were chosen, and faster ones of which a warning has told.
_WARNED: set[tuple[str, str | None]] = set()


@dataclass(frozen=True)
class Measured:
    """Measured times of one request.

    Attributes:
      request: the request, on one device.
      microseconds: times by the name of the kernel.
    """

    request: AttentionRequest
    microseconds: Mapping[str, float]


@dataclass(frozen=True)
class AttentionDecision:
    """The kernel of a request, and why.

    Attributes:
      request: the request.
      implementation: the name of the kernel.
      reason: why it was chosen.
      missed: what a kernel that is not possible here would gain, or None.
      faster: the name of that kernel.
      missing: what this installation lacks to execute the kernel, which was requested for devices
        of another machine; None: nothing.
    """

    request: AttentionRequest
    implementation: str
    reason: str
    missed: str | None = None
    faster: str | None = None
    missing: str | None = None

    def __str__(self) -> str:
        missed = "" if self.missed is None else f"; {self.missed}"
        missing = "" if self.missing is None else f", for another machine; here {self.missing}"
        return f"{self.implementation} ({self.reason}{missing}{missed}) for {self.request}"


def decide(request: AttentionRequest, requested: Sequence[str] | None = None) -> AttentionDecision:
    """The decision for a request.

    Args:
      request: the request.
      requested: names of kernels, of which the first that can is taken; None for the fastest.

    Raises:
      ValueError: for an unknown name, or if none of the requested kernels can execute the request.
    """
    if requested is not None:
        for name in requested or (requested,):
            if name not in KERNELS:
                raise ValueError(
                    f"implementation={name!r}: expected None, or names among"
                    f" {', '.join(map(repr, KERNELS))}"
                )
        return _requested(request, requested)
    possible = [name for name in KERNELS if unsupported_reason(name, request) is None]
    if possible == [REFERENCE] and not _is_gpu():
        return AttentionDecision(request, REFERENCE, f"the only kernel on {_platform()}")
    measured = _most_similar(request)
    if measured is None:
        return AttentionDecision(request, possible[0], f"{_kind()} was not measured")
    order = sorted(measured.microseconds, key=measured.microseconds.__getitem__)
    name = next((name for name in order if name in possible), possible[0])
    if name not in measured.microseconds:
        others = (f"{each}: {unsupported_reason(each, request)}" for each in order)
        return AttentionDecision(request, name, f"no faster kernel can; {'; '.join(others)}")
    missed = _missed(request, measured, order, name)
    return AttentionDecision(
        request, name, _comparison(measured, order), missed, order[0] if missed else None
    )


def kernel_of(decision: AttentionDecision) -> AttentionKernel:
    """The kernel of a decision. On GPUs of this machine, says once what another would gain."""
    pair = decision.implementation, decision.faster
    is_here = _is_gpu() and jax.default_backend() == "gpu"
    if decision.missed is not None and is_here and pair not in _WARNED:
        _WARNED.add(pair)
        warn_once(f"attention by {decision.implementation}: {decision.missed}")
    return KERNELS[decision.implementation]


def measured_rate(request: AttentionRequest, name: str) -> float | None:
    """Operations per second of one pass by a kernel, where the most similar request was measured.

    Args:
      request: the pass: the backward one if it is differentiated. Its size does not matter much.
      name: of the kernel.

    Returns:
      `AttentionRequest.flops` of the forward pass over the seconds; None if it was not measured.
    """
    found = _most_similar(replace(request, differentiated=False))
    if found is None or name not in found.microseconds:
        return None
    seconds = found.microseconds[name] * 1e-6
    if request.differentiated:
        both = _most_similar(replace(found.request, differentiated=True))
        if both is None or name not in both.microseconds:
            return None
        ratio = both.request.flops / found.request.flops
        seconds = both.microseconds[name] * 1e-6 / ratio - seconds
    return found.request.flops / seconds if seconds > 0 else None


def unsupported_reason(name: str, request: AttentionRequest) -> str | None:
    """Why a kernel cannot execute a request here, as part of a sentence; None if it can."""
    return KERNELS[name].unsupported_reason(request) or KERNELS[name].missing_reason()


def _requested(request: AttentionRequest, requested: Sequence[str]) -> AttentionDecision:
    """The first that can; for devices that are not here, also one that is not installed here."""
    reasons = []
    for name in requested:
        reason = unsupported_reason(name, request)
        if reason is None:
            return AttentionDecision(request, name, "; ".join(["requested", *reasons]))
        reasons.append(f"{name} is not possible: {reason}")
    for name in requested:
        if not _is_here() and KERNELS[name].unsupported_reason(request) is None:
            missing = KERNELS[name].missing_reason()
            return AttentionDecision(request, name, "requested", missing=missing)
    named = requested[0] if len(requested) == 1 else tuple(requested)
    raise UnsupportedSiteError(
        f"implementation={named!r}: {'; '.join(reasons)}; for {request}; pass"
        f" {(*requested, REFERENCE)} to use the first that can, or None to choose",
        OP,
        requested,
        "; ".join(reasons),
    )


def _missed(
    request: AttentionRequest, measured: Measured, order: Sequence[str], chosen: str
) -> str | None:
    """The gain of the fastest kernel, in words, if it is not possible here."""
    fastest = order[0]
    reason = unsupported_reason(fastest, request)
    if fastest == chosen or reason is None or chosen not in measured.microseconds:
        return None
    share = measured.microseconds[fastest] / measured.microseconds[chosen]
    return (
        f"{fastest} would take {share:.0%} of the time of {chosen}, {_passes(measured.request)},"
        f" but {reason}"
    )


def _comparison(measured: Measured, order: Sequence[str]) -> str:
    times = ", ".join(f"{measured.microseconds[name]:.0f} µs {name}" for name in order)
    return f"measured for {measured.request}, {_passes(measured.request)}: {times}"


def _passes(request: AttentionRequest) -> str:
    return "forward and backward" if request.differentiated else "forward"


@functools.cache
def _table(device_kind: str) -> tuple[Measured, ...]:
    found = data.shipped(device_kind, MEASURES)
    if found is None:
        return ()
    return tuple(
        Measured(request_of_json(record.problem), record.microseconds) for record in found.records
    )


def request_of_json(fields: Mapping[str, object]) -> AttentionRequest:
    """The request of a line of the table."""
    values: dict = dict(fields)
    return AttentionRequest(**{**values, "dtype": jnp.dtype(values["dtype"])})


def _most_similar(request: AttentionRequest) -> Measured | None:
    entries = _table(_kind()) or _table(DEVICE_ALIASES.get(_kind(), ""))
    return min(entries, key=lambda entry: _distance(entry.request, request), default=None)


#: How much a size matters: the weight of its binary logarithm.
_WEIGHTS = {"queries": 1.0, "keys": 1.0, "head_size": 2.0, "batch": 0.2, "heads": 0.2}


def _distance(measured: AttentionRequest, request: AttentionRequest) -> float:
    """How unlike two requests are. Masks and passes count more than sizes."""
    distance = 0.0
    for name, weight in _WEIGHTS.items():
        distance += weight * abs(math.log2(getattr(measured, name) / getattr(request, name)))
    for name in ("window", "segments"):
        one, other = getattr(measured, name), getattr(request, name)
        if (one is None) != (other is None):
            distance += 100.0
        elif one is not None and other is not None:
            distance += abs(math.log2(one / other))
    distance += 100.0 * (measured.differentiated != request.differentiated)
    distance += 100.0 * (measured.causal != request.causal)
    return distance + 100.0 * (measured.attends_to_itself != request.attends_to_itself)


def _kind() -> str:
    return traced_device().device_kind


def _platform() -> str:
    return traced_device().platform


def _is_here() -> bool:
    """Whether the devices of the traced program may be those of this machine."""
    return not _is_gpu() or jax.default_backend() == "gpu"


def _is_gpu() -> bool:
    return _platform() in ("gpu", "cuda", "rocm")
