"""The decision for one site: which backend executes it.

XLA's collectives are the default. Another backend must win by more than the error of its
measurement or its model.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from collective_matmul._compat import automatic_axes
from collective_matmul.dispatch.assessment import (
    Assessment,
    Assessments,
    assess,
    unsupported_reason,
)
from collective_matmul.dispatch.contract import Backend, Backends, Request
from collective_matmul.dispatch.recording import Decision, PeerAlternative, record
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.run_counts import numbered
from collective_matmul.dispatch.tables.lookup import Comparison
from collective_matmul.hardware import known_kinds, rates, traced_device
from collective_matmul.log import warn_once
from collective_matmul.peer_access import peer_kernels_allowed, peer_kernels_undecided
from collective_matmul.transport import described_transport


class UnsupportedSiteError(ValueError):
    """None of the backends that were requested by name can execute an op.

    A program that takes these names from its own user can say with them what to change.

    Attributes:
      op: the name of the op, such as "all_gather_matmul".
      requested: the names, best first.
      reason: the reasons, without the advice in the message.
    """

    def __init__(self, message: str, op: str, requested: Sequence[str], reason: str):
        super().__init__(message)
        self.op, self.requested, self.reason = op, tuple(requested), reason


_reference_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "reference_alone", default=False
)


@contextlib.contextmanager
def reference_alone() -> Iterator[None]:
    """The reference executes every op that is traced inside the block, whatever it asks for."""
    token = _reference_alone.set(True)
    try:
        yield
    finally:
        _reference_alone.reset(token)


def choose(site: Request, requested: Sequence[str] | None = None) -> Any:
    """The backend for a request: the first requested one that can execute it, or the fastest.

    The fastest according to measurements on this kind of device, or on a kind whose table it uses
    too. Where nothing similar was measured, according to the backends' own models.

    Args:
      site: the request; while it is being traced, call this inside its `jax.shard_map`.
      requested: names of backends, best first; None for the fastest. `Registry.requested` makes
        them of a user's argument.

    Returns:
      One of `site.backends`, whose class is the op's affair.

    Raises:
      UnsupportedSiteError: if none of the requested backends can execute the site.
    """
    if _reference_alone.get():
        requested = (site.backends.reference.name,)
    site = _with_vouched_predicate(site, requested)
    assessments = assess(site, requested or ())
    choice = _choice(assessments, requested)
    alternative, unsupported = _with_peer_kernels(assessments, requested, choice)
    name, reason, missed = choice.backend.name, choice.reason, choice.missed
    if missed:
        if alternative is None:
            warn_once(f"{site.op} falls back to {name}: {missed}")
        reason = "; ".join(filter(None, (f"fallback: {missed}", reason)))
    reason = "; ".join(filter(None, (*site.remarks, reason)))
    reference = assessments.reference_seconds
    communication = None if rates() is None else site.communication_seconds
    seconds = assessments.seconds(name)
    multiplied = site.multiplied_by(choice.backend)
    decision = Decision(
        site,
        name,
        reason,
        seconds,
        reference,
        communication,
        alternative,
        unsupported,
        multiplied,
        is_unmeasured=reference is not None and not assessments.are_measured,
        device_kind=traced_device().device_kind,
        automatic_axes=automatic_axes(),
    )
    record(decision)
    return numbered(decision, choice.backend)


def _choice(assessments: Assessments, requested: Sequence[str] | None) -> _Choice:
    if requested is None:
        return _fastest(assessments)
    return _first_supported(assessments, requested)


def _with_peer_kernels(
    assessments: Assessments, requested: Sequence[str] | None, chosen: _Choice
) -> tuple[PeerAlternative | None, str | None]:
    """`Decision.peer_alternative` and `Decision.peer_unsupported_reason`; None if nobody asks."""
    if not (peer_kernels_undecided() and _is_gpu()):
        return None, None
    with peer_kernels_allowed(True):
        assessments = assess(assessments.site, requested or ())
        choice = _choice(assessments, requested)
    if not choice.backend.uses_peer_kernels:
        return None, choice.missed if choice.missed != chosen.missed else None
    # Both by one measurement or one model, but for what XLA hides of the reference without it.
    without, with_it = (assessments.seconds(each.backend.name) for each in (chosen, choice))
    if without is None or with_it is None:
        return PeerAlternative(choice.backend.name, 0.0, 0.0, chosen.missed), None
    if chosen.backend.name == REFERENCE:
        without -= assessments.unhidden_seconds
    gained = without - with_it
    return PeerAlternative(choice.backend.name, without, gained, chosen.missed), None


def _with_vouched_predicate(site: Request, requested: Sequence[str] | None) -> Request:
    """The site, executed equally often on all devices if its caller requests one backend by name.

    `overlap` cannot know that, and does not request for the user.
    """
    if not site.divergent_axes or site.replaces or requested is None or len(requested) > 1:
        return site
    vouched = replace(site, divergent_axes=())  # type: ignore[type-var]
    (name,) = requested
    if (reason := unsupported_reason(site, name)) and not unsupported_reason(vouched, name):
        warn_once(f"{site.op} hangs with {name!r} unless all devices agree: {reason}")
    return vouched


class _Choice(NamedTuple):
    """A backend, the reason for it, and the reason to report against a better one, if any."""

    backend: Backend
    reason: str
    missed: str | None = None


def _first_supported(assessments: Assessments, requested: Sequence[str]) -> _Choice:
    """The first of the requested backends that can execute the site."""
    reasons = []
    for name in requested:
        assessment = assessments.by_name[name]
        if assessment.unsupported is None:
            return _Choice(assessment.backend, "requested", "; ".join(reasons) or None)
        reasons.append(_cannot(name, assessment.unsupported))
    reason = "; ".join(reasons)
    named: object = tuple(requested)
    if len(requested) == 1:
        named, reason = requested[0], assessments.by_name[requested[0]].unsupported or ""
    raise UnsupportedSiteError(
        f"{assessments.site.backends.argument}={named!r}: {reason}; for {assessments.site}; pass"
        f" {(*requested, REFERENCE)} to use the first that can, or None to choose per shape",
        assessments.site.op,
        requested,
        "; ".join(reasons),
    )


def _fastest(assessments: Assessments) -> _Choice:
    site = assessments.site
    reference, substitute = site.backends.reference, site.backends.substitute
    if not site.communicates:
        return _Choice(reference, "one device: nothing to communicate")
    if site.flops == 0:
        return _Choice(reference, "an empty array: nothing to multiply")
    choice = _fastest_known(assessments)
    if choice.backend is not reference or substitute is None:
        return choice
    if substitute.unsupported_reason(site) is None and (reason := _unprofitable(reference, site)):
        return choice._replace(backend=substitute, reason=reason)
    return choice


def _fastest_known(assessments: Assessments) -> _Choice:
    """The fastest backend by measurement or model."""
    device, site, overlaps = traced_device(), assessments.site, _is_gpu()
    reference, substitute = site.backends.reference, site.backends.substitute
    if assessments.reference_seconds is None:
        if not overlaps:
            return _Choice(reference, f"on {device.platform} nothing runs under a matmul")
        unknown = f"{device.device_kind} was not measured; collective_matmul.tune can"
        if meant := known_kinds(device.device_kind):
            unknown = f"{device.device_kind} is not known; JAX's name is {' or '.join(meant)}"
        missed = unknown if substitute is None else _unprofitable(substitute, site) or unknown
        return _Choice(reference, "", missed)
    believed = [
        each
        for each in assessments.by_name.values()
        if each.comparison is not None and each.comparison.is_believed
    ]
    excluded = {
        each.backend.name: reason
        for each in believed
        if (reason := _reason_against(site, each, overlaps))
    }
    best = _least_seconds(site.backends, believed)
    winner = _least_seconds(
        site.backends, (each for each in believed if each.backend.name not in excluded)
    )
    reasons = [_comparison(assessments, winner.name), *_unmeasured(assessments)]
    # A ring whose copies go through NCCL misses nothing where kernels of our own take its place.
    is_replaced = winner.uses_peer_kernels and not _is_copied(site, best)
    return _Choice(winner, "; ".join(reasons), None if is_replaced else excluded.get(best.name))


def _is_gpu() -> bool:
    return traced_device().platform in ("gpu", "cuda", "rocm")


def _least_seconds(backends: Backends, believed: Iterable[Assessment]) -> Backend:
    """The backend of least seconds; the reference if there is none."""
    seconds = {each.backend.name: each.comparison.seconds for each in believed if each.comparison}
    return backends[min(seconds, key=seconds.__getitem__)] if seconds else backends.reference


def _reason_against(site: Request, assessment: Assessment, overlaps: bool) -> str | None:
    """Why a backend that should be faster may not be chosen, as a sentence; None if it may."""
    if assessment.unsupported:
        return _cannot(assessment.backend.name, assessment.unsupported)
    if not overlaps:
        return None
    if not _is_copied(site, assessment.backend) and not assessment.is_measured:
        through = described_transport(site.transport)
        return f"{assessment.backend.name} would hide nothing: its transfers go{through}"
    return _unprofitable(assessment.backend, site)


def _is_copied(site: Request, backend: Backend) -> bool:
    """Whether copies between peers, if a backend needs any, are that for a request."""
    return site.transport == "peer_copies" or not backend.copies_between_peers


def _unprofitable(backend: Backend, site: Request) -> str | None:
    reason = backend.unprofitable_reason(site)
    return f"{backend.name} {reason}" if reason else None


def _cannot(name: str, reason: str) -> str:
    return f"{name} is not possible: {reason}"


def _unmeasured(assessments: Assessments) -> list[str]:
    """Remarks about backends that could be faster but were not measured."""
    return [
        f"{name} was not measured here"
        for name, each in assessments.by_name.items()
        if each.withheld and each.unsupported is None
    ]


def _comparison(assessments: Assessments, winner: str) -> str:
    """The seconds of the reference beside those of the winner, or of the best alternative."""
    compared = {
        name: each.comparison for name, each in assessments.by_name.items() if each.comparison
    }
    if winner == REFERENCE:
        winner = min(compared, key=lambda name: compared[name].seconds)
    assert assessments.reference_seconds is not None
    shown, basis = compared[winner], assessments.basis
    other = f" ({shown.basis})" if shown.basis != basis else ""
    doubt = "" if shown.gain <= 1 or shown.is_believed else f": {_doubt(winner, shown)}"
    return (
        f"{basis}: {assessments.reference_seconds * 1e6:.0f} µs {REFERENCE},"
        f" {shown.seconds * 1e6:.0f} µs {winner}{other}{doubt}"
    )


def _doubt(name: str, comparison: Comparison) -> str:
    """Why a backend that should be faster is not believed to be."""
    if math.isinf(comparison.relative_error):
        return f"{name} is chosen by measurements alone"
    return (
        f"a gain of {comparison.gain - 1:.1%} by {name} is less than the"
        f" {comparison.relative_error:.0%} by which such times may be wrong"
    )
