"""Requests for backends that can or cannot execute a site, and the warnings about them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from collective_matmul.dispatch import assessment, selection
from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import UnsupportedSiteError, choose
from collective_matmul.log import warn_once
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Einsum, Op, Site
from collective_matmul.peer_access import peer_kernels_allowed
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.dispatch.tables.example_tables import measure_as
from tests.reference import OPS, PEER_KERNELS, PORTABLE

every_op = pytest.mark.parametrize("op", OPS)
every_kernel = pytest.mark.parametrize("kernel", PEER_KERNELS)
Patch = pytest.MonkeyPatch

SECONDS = {"xla": 4e-6, "one_shot": 3.5e-6, "ring": 3e-6, "ring_direct": 2e-6, "fused": 1e-6}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: Patch) -> Iterator[None]:
    """The fused kernels were the fastest, and then a ring; kernels have all that they need."""

    measure_as(monkeypatch, SECONDS)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with peer_kernels_allowed(True):
        yield


@pytest.fixture
def on_h200() -> Iterator[None]:
    with tracing_for(H200):
        yield


@pytest.fixture
def logged(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings since. Warnings that were logged before may be logged again."""
    monkeypatch.setattr(selection, "warn_once", functools.cache(warn_once.__wrapped__))
    return lambda: [r.message for r in caplog.records if r.levelno == logging.WARNING]


def layer(op: Op, **facts: Any) -> Site:
    return site_of(op, 1024, 1024, 1024, **facts)


def decide(site: Site, *requested: str) -> tuple[str, str]:
    with record_decisions() as decisions:
        name = choose(site, requested or None).name
    (taken,) = decisions
    assert taken.implementation == name
    assert taken.seconds == pytest.approx(SECONDS[name])
    assert taken.reference_seconds == pytest.approx(SECONDS["xla"])
    return name, taken.reason


@pytest.mark.needs("fused")
@every_op
def test_fused_where_its_kernels_can(op: Op, on_h200: None, logged: Callable) -> None:
    assert decide(layer(op), "fused") == ("fused", "requested")
    assert decide(layer(op)) == ("fused", "measured: 4 µs xla, 1 µs fused")
    assert logged() == []


FLOATS = "dtypes ['float32']: these kernels take bfloat16, or float16, for all"


@every_op
@every_kernel
def test_the_next_fastest_where_the_fastest_cannot(
    op: Op, kernel: str, on_h200: None, logged: Callable, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(SECONDS, kernel, 1e-6)
    for other in {*PEER_KERNELS} - {kernel}:
        monkeypatch.setitem(SECONDS, other, 5e-6)
    site = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    why = f"{kernel} is not possible: {FLOATS}"
    for _ in range(2):
        reason = f"fallback: {why}; measured: 4 µs xla, 2 µs ring_direct"
        assert decide(site) == ("ring_direct", reason)
    assert logged() == [f"{op} falls back to ring_direct: {why}"]


@every_op
@every_kernel
def test_a_request_is_strict(op: Op, kernel: str, on_h200: None, logged: Callable) -> None:
    site = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    sentence = f"implementation={kernel!r}: {FLOATS}; for {site}; pass"
    with (
        record_decisions() as decisions,
        pytest.raises(UnsupportedSiteError, match=f"^{re.escape(sentence)}") as raised,
    ):
        choose(site, (kernel,))
    assert str(raised.value).endswith("to use the first that can, or None to choose per shape")
    assert (decisions, logged()) == ([], [])


@pytest.mark.needs("fused", "one_shot")
@every_op
def test_of_a_sequence_the_first_that_can_is_used_and_the_others_are_logged_once(
    op: Op, on_h200: None, logged: Callable
) -> None:
    site = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    why = "; ".join(f"{name} is not possible: {FLOATS}" for name in ("fused", "one_shot"))
    for _ in range(2):
        chosen = decide(site, "fused", "one_shot", "ring", "xla")
        assert chosen == ("ring", f"fallback: {why}; requested")
    assert logged() == [f"{op} falls back to ring: {why}"]
    assert decide(site, "xla", "fused") == ("xla", "requested")
    with pytest.raises(UnsupportedSiteError, match=r"^implementation=\('fused', 'one_shot'\): "):
        choose(site, ("fused", "one_shot"))


@every_op
@pytest.mark.parametrize("name", PORTABLE[:2])
def test_other_requests_are_followed_where_kernels_cannot(
    op: Op, name: str, logged: Callable
) -> None:
    assert decide(layer(op), name) == (name, "requested")
    assert logged() == []


@pytest.mark.needs("fused")
@every_op
def test_of_all_that_is_not_chosen_the_best_is_logged(
    op: Op, on_h200: None, logged: Callable, monkeypatch: Patch
) -> None:
    peers = "GPU 0 cannot address the memory of GPU 1"
    fused_backend = sys.modules[type(BACKENDS["fused"]).__module__]
    monkeypatch.setattr(fused_backend, "no_peer_access_reason", lambda: peers)
    monkeypatch.setitem(SECONDS, "one_shot", 5e-6)
    fused = f"fused is not possible: {peers}"
    reason = "measured: 4 µs xla, 2 µs ring_direct"
    assert decide(layer(op)) == ("ring_direct", f"fallback: {fused}; {reason}")
    assert logged() == [f"{op} falls back to ring_direct: {fused}"]


@pytest.mark.needs("one_shot")
def test_a_backend_that_is_slower_is_not_missed(monkeypatch: Patch, logged: Callable) -> None:
    others = dict.fromkeys(BACKENDS, 3e-6)
    measure_as(monkeypatch, {**others, "xla": 1e-6, "fused": 2e-6, "one_shot": 2e-6})
    site = dataclasses.replace(layer("all_gather_matmul"), dtype=np.dtype("float32"))
    with tracing_for(H200), record_decisions() as decisions:
        choose(site)
    assert decisions[0].reason == "measured: 1 µs xla, 2 µs one_shot"
    assert logged() == []


@every_op
@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H200, None),
        (AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"), None),
        (AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu"), "Hopper GPUs only"),
        (AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"), "Hopper"),
        (AbstractDevice("NVIDIA HGX", num_cores=132, platform="gpu"), "Hopper GPUs only"),
    ],
    ids=str,
)
@every_kernel
def test_the_mesh_says_whether_there_are_kernels(
    op: Op, kernel: str, device: AbstractDevice, reason: str | None
) -> None:
    with tracing_for(device):
        found = unsupported_reason(layer(op), kernel)
    assert found == reason or (reason and found and reason in found)
    assert "Hopper GPUs only" in str(unsupported_reason(layer(op), kernel))  # Of this machine.


@every_op
@every_kernel
def test_peer_kernels_need_a_program_that_may_have_them(
    op: Op, kernel: str, on_h200: None, logged: Callable
) -> None:
    """In others a request is refused, and auto chooses among the rest."""
    why = (
        f"{kernel} is not possible: collectives at the same time, as this program is compiled,"
        " allow no kernel to address peers' memory; compile with"
        " collective_matmul.overlap_jit(..., peer_kernels=True)"
    )
    with peer_kernels_allowed(False):
        assert decide(layer(op)) == ("ring_direct", "measured: 4 µs xla, 2 µs ring_direct")
        assert logged() == []
        assert decide(layer(op), kernel, "ring") == ("ring", f"fallback: {why}; requested")
        with pytest.raises(UnsupportedSiteError, match=re.escape(why.partition(": ")[2])):
            choose(layer(op), (kernel,))
    assert logged() == [f"{op} falls back to ring: {why}"]


@every_op
@pytest.mark.parametrize("allowed", [False, True])
def test_no_kernel_is_configured_for_programs_that_may_have_none(
    op: Op, allowed: bool, on_h200: None, monkeypatch: Patch
) -> None:
    asked: list[str] = []
    ask = assessment.unsupported_reason
    monkeypatch.setattr(
        assessment,
        "unsupported_reason",
        lambda site, name: (asked.append(name), ask(site, name))[1],
    )
    with peer_kernels_allowed(allowed):
        decide(layer(op))
    assert {*PEER_KERNELS} & {*asked} == ({*PEER_KERNELS} if allowed else set())
    assert len(asked) == len({*asked})  # Each is asked once.


@every_op
@every_kernel
def test_kernels_need_memory_that_processes_share(
    op: Op, kernel: str, on_h200: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert str(unsupported_reason(layer(op), kernel)).startswith("2 processes: ")


@every_op
@every_kernel
@pytest.mark.parametrize("size", [1, 2])
def test_kernels_are_not_divided_over_automatic_axes(op: Op, kernel: str, size: int) -> None:
    with tracing_for(H200, data=size):
        found = unsupported_reason(layer(op), kernel)
    assert (found is None) == (size == 1)
    assert found is None or "automatic mesh axes" in found


@pytest.mark.needs("fused")
@every_op
def test_a_kernel_that_was_not_measured_is_named(
    op: Op, on_h200: None, logged: Callable, monkeypatch: Patch
) -> None:
    """Where it cannot execute the site, nobody misses a measurement."""
    monkeypatch.delitem(SECONDS, "fused")
    without = "measured: 4 µs xla, 2 µs ring_direct"
    assert decide(layer(op)) == ("ring_direct", f"{without}; fused was not measured here")
    float32 = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    assert decide(float32) == ("ring_direct", without)
    assert decide(layer(op), "ring") == ("ring", "requested")
    with peer_kernels_allowed(False):
        assert decide(layer(op)) == ("ring_direct", without)
    assert logged() == []


@every_op
@every_kernel
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0)])
def test_only_newer_versions_have_kernels(
    op: Op, kernel: str, version: tuple[int, ...], on_h200: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    found = unsupported_reason(layer(op), kernel)
    assert (found is None) == (version >= (0, 11))
    assert found is None or found.endswith(": these kernels need 0.11 or newer")


@every_kernel
def test_an_einsum_that_is_not_a_matmul_has_no_kernel(
    kernel: str, on_h200: None, logged: Callable
) -> None:
    einsum = Einsum("sd,sf->df", ((256, 512), (1024, 64)), True)
    site = layer("all_gather_matmul", einsum=einsum, dimension=None)
    why = f"{kernel} is not possible: 'sd,sf->df' is not a matmul, and {kernel} executes nothing"
    assert decide(site, kernel, "ring") == ("ring", f"fallback: {why} else; requested")
    assert logged() == [f"all_gather_matmul falls back to ring: {why} else"]
    plain = dataclasses.replace(site, einsum=None, dimension=0)
    assert unsupported_reason(plain, kernel) is None


@every_op
@every_kernel
def test_nothing_to_do_is_a_reason(op: Op, kernel: str, on_h200: None) -> None:
    assert "nothing to communicate" in str(unsupported_reason(layer(op, devices=1), kernel))
    assert "nothing to multiply" in str(unsupported_reason(site_of(op, 0, 1024, 1024), kernel))


@every_op
def test_xla_executes_every_site(op: Op) -> None:
    assert unsupported_reason(layer(op), "xla") is None
