"""The answers of all backends about a site, collected once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from collective_matmul.dispatch.contract import Backend, Prediction, Request
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.tables import lookup, table_files
from collective_matmul.dispatch.tables.lookup import Comparison
from collective_matmul.hardware import traced_device
from collective_matmul.peer_access import peer_kernels_disallowed_reason


@dataclass(frozen=True)
class Assessment:
    """The answers of one backend about a site.

    Attributes:
      backend: the backend.
      unsupported: why it cannot execute the site, or None.
      comparison: its time beside that of the reference; None if unknown, and for the reference.
      is_measured: whether the comparison is by tables.
      withheld: whether it makes a prediction that is not compared with measurements of others.
    """

    backend: Backend
    unsupported: str | None
    comparison: Comparison | None = None
    is_measured: bool = False
    withheld: bool = False


@dataclass(frozen=True)
class Assessments:
    """The answers of all backends about a site.

    Attributes:
      site: the site.
      by_name: one for each backend that the program may use.
      reference_seconds: time of the reference; None if unknown.
      basis: source of `reference_seconds`, in words.
      unhidden_seconds: the part of `reference_seconds` for collectives that XLA hides in other
        programs; 0 but where kernels may address peers' memory.
    """

    site: Request
    by_name: Mapping[str, Assessment]
    reference_seconds: float | None
    basis: str
    unhidden_seconds: float = 0.0

    @property
    def are_measured(self) -> bool:
        """Whether the times of any backend are by tables."""
        return any(each.is_measured for each in self.by_name.values())

    def seconds(self, name: str) -> float | None:
        """The seconds of a backend; None if unknown."""
        if name == REFERENCE:
            return self.reference_seconds
        found = self.by_name.get(name)
        return found.comparison.seconds if found and found.comparison else None


def unsupported_reason(site: Request, name: str) -> str | None:
    """Why a backend cannot execute a site, or the program may not use it; None if it can."""
    backend = site.backends[name]
    reason = backend.lacking_reason(site) or backend.unsupported_reason(site)
    return reason or (peer_kernels_disallowed_reason() if backend.uses_peer_kernels else None)


def assess(site: Request, requested: Collection[str] = ()) -> Assessments:
    """Asks every backend that the program may use, and those that are requested.

    Kernels that nobody may use are not asked: finding their configurations takes milliseconds.
    Where they may be used, XLA hides nothing of the reference's collectives. Its measurements are
    of programs in which it does; models never count with it.
    """
    disallowed, backends = peer_kernels_disallowed_reason(), site.backends
    asked = [b for b in backends.values() if not (disallowed and b.uses_peer_kernels)]
    named = {backend.name for backend in asked}.union(requested)
    reasons = {name: unsupported_reason(site, name) for name in backends if name in named}
    measured, predicted = _measured(site, asked), _predicted(site, asked)
    used = dict(measured)
    for name, comparison in predicted.items():
        if name not in measured and (not measured or backends[name].predicts_precisely):
            used[name] = comparison
    first = next(iter(used.values()), None)
    reference = None if first is None else first.reference_seconds
    unhidden = 0.0 if disallowed or reference is None else site.overlapped_seconds
    more = unhidden if measured else 0.0
    return Assessments(
        site,
        {
            name: Assessment(
                backends[name],
                reason,
                _compared(used[name], reference, more) if reference and name in used else None,
                is_measured=name in measured,
                withheld=name in predicted and name not in used,
            )
            for name, reason in reasons.items()
        },
        None if reference is None else reference + more,
        "" if first is None else first.basis,
        unhidden,
    )


def _measured(site: Request, backends: list[Backend]) -> dict[str, Comparison]:
    """Comparisons by tables, those of the site's own entries first."""
    if not _is_worth_asking(site):
        return {}
    tables = table_files.known(traced_device().device_kind)
    usable = [backend.name for backend in backends if backend.name != REFERENCE]
    found = {name: lookup.look_up(site, name, tables, usable) for name in usable}
    if site.transport == "nccl":
        # Kernels that address peers' memory take as long in one process as in several of a node,
        # and so does the reference, whose bytes always go through NCCL.
        local = replace(site, transport="peer_copies")  # type: ignore[type-var]
        for backend in backends:
            if backend.uses_peer_kernels and found[backend.name] is None:
                found[backend.name] = lookup.look_up(local, backend.name, tables, usable)
    known = {name: comparison for name, comparison in found.items() if comparison is not None}
    return dict(sorted(known.items(), key=lambda item: not item[1].is_own))


def _predicted(site: Request, backends: list[Backend]) -> dict[str, Comparison]:
    """Comparisons by the backends' own models; none if the reference has none."""
    reference = site.backends.reference.predict(site) if _is_worth_asking(site) else None
    if reference is None:
        return {}
    predictions = {
        b.name: b.predict(site)
        for b in backends
        if b.name != REFERENCE and b.lacking_reason(site) is None
    }
    return {
        name: _beside(prediction, reference)
        for name, prediction in predictions.items()
        if prediction is not None
    }


def _is_worth_asking(site: Request) -> bool:
    """Whether there is anything to communicate and to compute."""
    return site.communicates and site.flops > 0


def _compared(comparison: Comparison, reference: float, more: float) -> Comparison:
    """The comparison with the reference of all backends, which takes some seconds more here."""
    common = comparison.with_reference(reference)
    return replace(common, reference_seconds=reference + more)


def _beside(prediction: Prediction, reference: Prediction) -> Comparison:
    return Comparison(
        prediction.seconds, reference.seconds, prediction.relative_error, prediction.basis
    )
