"""The decision for one site."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from collective_matmul._compat import partly_automatic
from collective_matmul.backends import IMPLEMENTATIONS, KERNELS, RINGS
from collective_matmul.dispatch import cost_model, lookup, table_files
from collective_matmul.dispatch.lookup import Prediction
from collective_matmul.dispatch.obstacles import obstacle_of
from collective_matmul.log import warn_once
from collective_matmul.peer_access import no_peer_copies_reason, peer_kernels_disallowed_reason
from collective_matmul.site import Site


@dataclass(frozen=True)
class Decision:
    """What carries out a site, and why.

    Attributes:
      site: where.
      implementation: by name.
      reason: in words.
      seconds: predicted for the implementation, a weight gradient included; None if unknown.
      reference_seconds: the same for bulk.
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
    nothing again, unless it is `force_retrace`.

    Args:
      hidden: whether blocks around this one do not hear of them.
    """
    decisions: list[Decision] = []
    around = () if hidden else _recorders.get()
    token = _recorders.set((*around, decisions))
    try:
        yield decisions
    finally:
        _recorders.reset(token)


def record(decision: Decision) -> None:
    """Tells all that are recording."""
    for decisions in _recorders.get():
        decisions.append(decision)


def force_retrace() -> contextlib.AbstractContextManager:
    """A block in which `jax.jit` traces again what it has traced before it."""
    return _trace_number(next(_trace_numbers))


def decisions_of(fun: Callable, *args: Any, **kwargs: Any) -> list[Decision]:
    """Every decision for a function, which is traced for these arguments, and not compiled."""
    with force_retrace(), record_decisions() as decisions:
        jax.eval_shape(fun, *args, **kwargs)
    return decisions


def choose(site: Site, requested: str | None) -> str:
    """The name of the implementation for `site`: the one requested, else the fastest.

    The fastest by measurement, of this kind of device or of one that can stand in for it; by the
    cost model, for GPUs that it is of, where nothing near was measured. Bulk wherever nothing else
    gains more over it than measurement or model may be wrong by. Of kernels that address peers only
    in programs that may have them. The fastest of the others too where such a kernel is requested
    and cannot do it, which is said once.

    Raises:
      ValueError: if another implementation requested by name cannot carry out the site.
    """
    obstacle = None if requested is None else obstacle_of(site, requested)
    if obstacle and requested not in KERNELS:
        raise ValueError(f"implementation={requested!r}: {obstacle}; use 'xla' for {site}")
    # Of kernels that the program forbids, or that are requested in vain, no gain need be heard, nor
    # decide what else is known. Of those that cannot do the site it is, to say what is missed.
    left_out = (requested,) if requested and obstacle else ()
    if peer_kernels_disallowed_reason():
        left_out = tuple(KERNELS)
    prediction = _predict(site, left_out)
    if requested is None or obstacle:
        choice = _decide(site, prediction)
    else:
        choice = _Choice(requested, "requested")
    name, reason, missed = choice
    if obstacle:
        missed = "; ".join(filter(None, (f"{requested} is not possible: {obstacle}", missed)))
    if missed:
        warn_once(f"{site.op} falls back to {name}: {missed}")
        reason = "; ".join(filter(None, (f"fallback: {missed}", reason)))
    seconds = prediction.seconds if prediction else {}
    record(Decision(site, name, reason, seconds.get(name), seconds.get("xla")))
    return name


class _Choice(NamedTuple):
    """An implementation and the reason; and why it is not a better one, if that is to be said."""

    implementation: str
    reason: str
    missed: str | None = None


def _predict(site: Site, left_out: Collection[str]) -> Prediction | None:
    """Seconds by table or model; None where neither knows, or there is nothing to choose."""
    if site.axis_size == 1 or site.flops == 0:
        return None
    found = _known(site, left_out)
    if not found:
        return None
    is_unknown = "one_shot" not in {*found.seconds, *left_out}
    if is_unknown and _is_modelled() and not obstacle_of(site, "one_shot"):
        found = found.beside(cost_model.predict_one_shot(site))
    if found.fastest(IMPLEMENTATIONS) != "xla" or found.seconds.keys() & RINGS:
        return found
    # Kernels alone were measured, and gain nothing: a ring may.
    rings = _known(site, {*left_out, *KERNELS})
    return rings.beside(found) if rings and rings.fastest(RINGS) in RINGS else found


def _known(site: Site, left_out: Collection[str]) -> Prediction | None:
    found = lookup.look_up(site, table_files.known(_device().device_kind), left_out)
    if found or not _is_modelled():
        return found
    has_kernel = "fused" not in left_out and not obstacle_of(site, "fused")
    return cost_model.predict(site, fused=has_kernel)


def _is_modelled() -> bool:
    """Whether the cost model is of the GPUs that are traced for."""
    return _device().device_kind in cost_model.DEVICE_KINDS


def _decide(site: Site, prediction: Prediction | None) -> _Choice:
    """What is chosen where nothing is requested."""
    if site.axis_size == 1:
        return _Choice("xla", "one device: nothing to communicate")
    if site.flops == 0:
        return _Choice("xla", "an empty array: nothing to multiply")
    choice = _fastest(site, prediction)
    scattered = site.op != "matmul_all_reduce"
    if choice.implementation == "xla" and scattered and partly_automatic():
        # XLA cannot cut an all-gather or a reduce-scatter over one axis by another that it shards
        # by itself: it would first gather what that axis shards, such as the batch. Permutes it can
        # cut, and sending each shard straight to its place is the same traffic.
        reason = "a bulk collective would gather what the automatic mesh axes shard"
        return choice._replace(implementation="ring_direct", reason=reason)
    return choice


def _fastest(site: Site, prediction: Prediction | None) -> _Choice:
    """The fastest that can carry out a site, of rings those that can hide something."""
    device = _device()
    overlaps = device.platform in ("gpu", "cuda", "rocm")
    transport = no_peer_copies_reason(site.axis_name) if overlaps else None
    if prediction is None and not overlaps:
        return _Choice("xla", f"on {device.platform} nothing runs under a matmul")
    if prediction is None:
        unknown = f"{device.device_kind} was not measured; collective_matmul.tune can"
        return _Choice("xla", "", transport or unknown)
    why_not: dict[str, str] = {}
    for name in filter(IMPLEMENTATIONS.__contains__, prediction.seconds):
        if obstacle := obstacle_of(site, name):
            why_not[name] = f"{name} is not possible: {obstacle}"
        elif transport and name in RINGS:
            why_not[name] = f"{name} would hide nothing: {transport}"
    best = prediction.fastest(IMPLEMENTATIONS)
    name = prediction.fastest(IMPLEMENTATIONS.keys() - why_not.keys())
    reasons = filter(None, (_comparison(prediction, name), _why_not_fused(site, prediction)))
    return _Choice(name, "; ".join(reasons), why_not.get(best))


def _why_not_fused(site: Site, prediction: Prediction) -> str | None:
    """Why nothing is predicted of kernels that could carry out a site; None if they could not."""
    # What the program forbids is known at once; what a site allows takes milliseconds of planning.
    if (
        "fused" in prediction.seconds
        or peer_kernels_disallowed_reason()
        or obstacle_of(site, "fused")
    ):
        return None
    return "fused was not measured here"


def _comparison(prediction: Prediction, name: str) -> str:
    """The basis of a prediction, with bulk's seconds beside those of the best alternative."""
    others = [other for other in prediction.seconds if other != "xla" and other in IMPLEMENTATIONS]
    if name == "xla" and others:
        name = min(others, key=prediction.seconds.__getitem__)
    shown = dict.fromkeys(("xla", name))
    bases = {key: prediction.bases.get(key, prediction.basis) for key in shown}
    text = ", ".join(
        f"{prediction.seconds[key] * 1e6:.0f} µs {key}"
        + (f" ({basis})" if basis != prediction.basis else "")
        for key, basis in bases.items()
    )
    return f"{prediction.basis}: {text}"


def _device() -> jax.sharding.AbstractDevice:
    """The kind of device that is traced for: the mesh's if it says so, else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    first = jax.devices()[0]
    return jax.sharding.AbstractDevice(first.device_kind, num_cores=None, platform=first.platform)
