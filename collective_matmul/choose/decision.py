"""The decision for one site."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from collective_matmul._compat import partly_automatic
from collective_matmul.choose.cost_model import bulk_seconds, ring_seconds
from collective_matmul.choose.site import Site


@dataclass(frozen=True)
class Decision:
    """What carries out a site, and why."""

    site: Site
    implementation: str
    reason: str


_recorders: contextvars.ContextVar[tuple[list[Decision], ...]] = contextvars.ContextVar(
    "recorders", default=()
)


@contextlib.contextmanager
def record_decisions() -> Iterator[list[Decision]]:
    """Collects every decision taken while tracing inside the block, in order.

    Tracing happens once per compiled shape: a function that `jax.jit` has already traced decides
    nothing again.
    """
    decisions: list[Decision] = []
    token = _recorders.set((*_recorders.get(), decisions))
    try:
        yield decisions
    finally:
        _recorders.reset(token)


def choose(site: Site, requested: str | None) -> str:
    """The name of the implementation for `site`: the one requested, else the faster by prediction.

    The prediction is of NVLink GPUs driven by one process; elsewhere a ring gains nothing over the
    collective and bulk is chosen.

    Raises:
      ValueError: if the implementation requested by name cannot carry out the site.
    """
    if requested is None:
        decision = _decide(site)
    else:
        if obstacle := _obstacle(site, requested):
            raise ValueError(f"implementation={requested!r}: {obstacle}; use 'bulk' for {site}")
        decision = Decision(site, requested, "requested")
    for decisions in _recorders.get():
        decisions.append(decision)
    return decision.implementation


def _obstacle(site: Site, implementation: str) -> str | None:
    """Why `implementation` cannot carry out `site`, or None."""
    if (
        implementation != "bulk"
        and site.op == "matmul_all_reduce"
        and site.rows % site.axis_size != 0
    ):
        return (
            f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
            f" {site.axis_size}"
        )
    return None


def _decide(site: Site) -> Decision:
    if site.axis_size == 1:
        return Decision(site, "bulk", "one device: nothing to communicate")
    decision = _predict(site)
    scattered = site.op != "matmul_all_reduce"
    if decision.implementation == "bulk" and scattered and partly_automatic():
        # XLA cannot cut an all-gather or a reduce-scatter over one axis by another that it shards
        # by itself: it would first gather what that axis shards, such as the batch. Permutes it can
        # cut, and sending each shard straight to its place is the same traffic.
        reason = "a bulk collective would gather what the automatic mesh axes shard"
        return Decision(site, "ring_direct", reason)
    return decision


def _predict(site: Site) -> Decision:
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda", "rocm"):
        return Decision(site, "bulk", f"on {platform} nothing runs under a matmul")
    obstacle = _obstacle(site, "ring")
    if jax.process_count() > 1:
        obstacle = "copies between GPUs need all of them in one process"
    if obstacle:
        _say_once(f"{site.op} falls back to bulk: {obstacle}")
        return Decision(site, "bulk", obstacle)
    bulk, ring = bulk_seconds(site), ring_seconds(site)
    name = "ring" if ring < bulk else "bulk"
    return Decision(site, name, f"predicted {bulk * 1e6:.0f} µs bulk, {ring * 1e6:.0f} µs ring")


@functools.cache
def _say_once(sentence: str) -> None:
    logging.getLogger("collective_matmul").warning(sentence)
