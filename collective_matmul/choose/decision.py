"""The decision for one site."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from collective_matmul._compat import partly_automatic
from collective_matmul.choose import cost_model, tables
from collective_matmul.choose.site import Site
from collective_matmul.choose.tables import Prediction
from collective_matmul.implementations import IMPLEMENTATIONS, RINGS
from collective_matmul.log import say_once
from collective_matmul.peer_access import transport_obstacle


@dataclass(frozen=True)
class Decision:
    """What carries out a site, and why.

    Attributes:
      site: where.
      implementation: by name.
      reason: in words.
      seconds: predicted for the implementation, a weight gradient included; None if unknown.
      bulk_seconds: the same for bulk.
    """

    site: Site
    implementation: str
    reason: str
    seconds: float | None = None
    bulk_seconds: float | None = None


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
    nothing again, unless it is `traced_anew`.

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


def traced_anew() -> contextlib.AbstractContextManager:
    """A block in which `jax.jit` traces again what it has traced before it."""
    return _trace_number(next(_trace_numbers))


def decisions_of(fun: Callable, *args: Any, **kwargs: Any) -> list[Decision]:
    """Every decision for a function, which is traced for these arguments, and not compiled."""
    with traced_anew(), record_decisions() as decisions:
        jax.eval_shape(fun, *args, **kwargs)
    return decisions


def choose(site: Site, requested: str | None) -> str:
    """The name of the implementation for `site`: the one requested, else the fastest.

    The fastest by measurement, of this kind of device or of one that can stand in for it; by the
    cost model, for GPUs that it is of, where nothing near was measured. Bulk wherever nothing else
    gains more over it than measurement or model may be wrong by.

    Raises:
      ValueError: if the implementation requested by name cannot carry out the site.
    """
    prediction = _predict(site)
    if requested is None:
        implementation, reason = _decide(site, prediction)
    elif obstacle := obstacle_of(site, requested):
        raise ValueError(f"implementation={requested!r}: {obstacle}; use 'bulk' for {site}")
    else:
        implementation, reason = requested, "requested"
        if requested == "fused":
            reason += "; a ring or bulk stands in where its kernels cannot do it, and says so"
    seconds = prediction.seconds if prediction else {}
    record(Decision(site, implementation, reason, seconds.get(implementation), seconds.get("bulk")))
    return implementation


def obstacle_of(site: Site, implementation: str) -> str | None:
    """Why `implementation` cannot carry out `site`, or None."""
    if (
        implementation in RINGS
        and site.op == "matmul_all_reduce"
        and site.rows % site.axis_size != 0
    ):
        return (
            f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
            f" {site.axis_size}"
        )
    return None


def _predict(site: Site) -> Prediction | None:
    """Seconds by table or model; None where neither knows, or there is nothing to choose."""
    if site.axis_size == 1 or site.flops == 0:
        return None
    kind = _device().device_kind
    if found := tables.look_up(site, tables.known(kind)):
        return found
    return cost_model.predict(site) if kind in cost_model.DEVICE_KINDS else None


def _decide(site: Site, prediction: Prediction | None) -> tuple[str, str]:
    """The implementation and the reason, where none is requested."""
    if site.axis_size == 1:
        return "bulk", "one device: nothing to communicate"
    if site.flops == 0:
        return "bulk", "an empty array: nothing to multiply"
    implementation, reason = _fastest(site, prediction)
    scattered = site.op != "matmul_all_reduce"
    if implementation == "bulk" and scattered and partly_automatic():
        # XLA cannot cut an all-gather or a reduce-scatter over one axis by another that it shards
        # by itself: it would first gather what that axis shards, such as the batch. Permutes it can
        # cut, and sending each shard straight to its place is the same traffic.
        return "ring_direct", "a bulk collective would gather what the automatic mesh axes shard"
    return implementation, reason


def _fastest(site: Site, prediction: Prediction | None) -> tuple[str, str]:
    device = _device()
    overlaps = device.platform in ("gpu", "cuda", "rocm")
    if prediction is None and not overlaps:
        return "bulk", f"on {device.platform} nothing runs under a matmul"
    obstacle = transport_obstacle(site.axis_name) if overlaps else None
    obstacle = obstacle or obstacle_of(site, "ring")
    if prediction is None:
        obstacle = obstacle or f"{device.device_kind} was not measured; collective_matmul.tune can"
    if obstacle or prediction is None:
        say_once(f"{site.op} falls back to bulk: {obstacle}")
        return "bulk", f"fallback: {obstacle}"
    name = prediction.fastest(IMPLEMENTATIONS)
    return name, _comparison(prediction, name)


def _comparison(prediction: Prediction, name: str) -> str:
    """The basis of a prediction, with bulk's seconds beside those of the best alternative."""
    others = [other for other in prediction.seconds if other != "bulk" and other in IMPLEMENTATIONS]
    if name == "bulk" and others:
        name = min(others, key=prediction.seconds.__getitem__)
    shown = dict.fromkeys(("bulk", name))
    text = ", ".join(f"{prediction.seconds[key] * 1e6:.0f} µs {key}" for key in shown)
    return f"{prediction.basis}: {text}"


def _device() -> jax.sharding.AbstractDevice:
    """The kind of device that is traced for: the mesh's if it says so, else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    first = jax.devices()[0]
    return jax.sharding.AbstractDevice(first.device_kind, num_cores=None, platform=first.platform)
