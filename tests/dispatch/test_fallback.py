"""What is decided, and said, where a kernel that addresses peers cannot carry out a site."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from collective_matmul.dispatch.obstacles import obstacle_of
from jax.sharding import AbstractDevice

from collective_matmul.dispatch import obstacles, selection
from collective_matmul.dispatch.lookup import Prediction
from collective_matmul.dispatch.selection import choose, record_decisions
from collective_matmul.log import warn_once
from collective_matmul.peer_access import peer_kernels_allowed
from collective_matmul.site import Einsum, Op, Site
from tests.dispatch.sites import BFLOAT16, H200, site_of, tracing_for
from tests.reference import AXIS, OPS, PEER_KERNELS

every_op = pytest.mark.parametrize("op", OPS)
every_kernel = pytest.mark.parametrize("kernel", PEER_KERNELS)
Patch = pytest.MonkeyPatch

SECONDS = {"xla": 4e-6, "one_shot": 3.5e-6, "ring": 3e-6, "ring_direct": 2e-6, "fused": 1e-6}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: Patch) -> Iterator[None]:
    """The fused kernels were the fastest, and then a ring; kernels have all that they need."""

    def look_up(site: Site, tables: Any, left_out: Collection[str]) -> Prediction:
        seconds = {name: value for name, value in SECONDS.items() if name not in left_out}
        return Prediction(seconds, 0.02, "measured")

    monkeypatch.setattr(selection.tables, "look_up", look_up)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with peer_kernels_allowed(True):
        yield


@pytest.fixture
def on_h200() -> Iterator[None]:
    with tracing_for(H200):
        yield


@pytest.fixture
def said(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said. Whatever was said once before may be said again."""
    monkeypatch.setattr(selection, "warn_once", functools.cache(warn_once.__wrapped__))
    return lambda: [r.message for r in caplog.records if r.levelno == logging.WARNING]


def layer(op: Op, **facts: Any) -> Site:
    return site_of(op, 1024, 1024, 1024, **facts)


def decide(site: Site, requested: str | None) -> tuple[str, str]:
    with record_decisions() as decisions:
        name = choose(site, requested)
    (taken,) = decisions
    assert taken.implementation == name
    assert (taken.seconds, taken.reference_seconds) == (SECONDS[name], SECONDS["xla"])
    return name, taken.reason


@every_op
def test_fused_where_its_kernels_can(op: Op, on_h200: None, said: Callable) -> None:
    assert decide(layer(op), "fused") == ("fused", "requested")
    assert decide(layer(op), None) == ("fused", "measured: 4 µs bulk, 1 µs fused")
    assert said() == []


@every_op
@every_kernel
def test_the_fastest_of_the_others_where_they_cannot(
    op: Op, kernel: str, on_h200: None, said: Callable, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(SECONDS, kernel, 1e-6)
    for other in PEER_KERNELS.keys() - {kernel}:
        monkeypatch.delitem(SECONDS, other)
    site = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    why = (
        f"{kernel} is not possible: dtypes ['float32']: these kernels take bfloat16, or"
        " float16, for all"
    )
    reason = f"fallback: {why}; measured: 4 µs bulk, 2 µs ring_direct"
    for requested in (None, kernel, None, kernel):
        assert decide(site, requested) == ("ring_direct", reason)
    assert said() == [f"{op} falls back to ring_direct: {why}"]


@every_op
def test_other_requests_are_followed_where_kernels_cannot(op: Op, said: Callable) -> None:
    for name in ("xla", "ring"):
        assert decide(layer(op), name) == (name, "requested")
    assert said() == []


@every_op
def test_of_all_that_is_not_possible_the_reasons_are_said(
    op: Op, on_h200: None, said: Callable, monkeypatch: Patch
) -> None:
    peers = "GPU 0 cannot address the memory of GPU 1"
    monkeypatch.setattr(selection, "no_peer_copies_reason", lambda axis_name: peers)
    monkeypatch.setattr(obstacles, "no_peer_access_reason", lambda: peers)
    fused = f"fused is not possible: {peers}"
    ring = f"ring_direct would hide nothing: {peers}"
    measured = "measured: 4 µs bulk, 2 µs ring_direct"
    assert decide(layer(op), "fused") == ("xla", f"fallback: {fused}; {ring}; {measured}")
    assert decide(layer(op), None)[1].startswith(f"fallback: {fused}; ")
    assert said() == [f"{op} falls back to bulk: {why}" for why in (f"{fused}; {ring}", fused)]


def test_what_bulk_is_faster_than_needs_no_kernel(monkeypatch: Patch, said: Callable) -> None:
    """That it is not possible is nothing to say."""
    found = Prediction({"xla": 1e-6, "fused": 2e-6}, 0.02, "measured")
    monkeypatch.setattr(selection.tables, "look_up", lambda *args: found)
    site = dataclasses.replace(layer("all_gather_matmul"), dtype=np.dtype("float32"))
    with tracing_for(H200), record_decisions() as decisions:
        choose(site, None)
    assert decisions[0].reason == "measured: 1 µs bulk, 2 µs fused"
    assert said() == []


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
        found = obstacle_of(layer(op), kernel)
    assert found == reason or (reason and found and reason in found)
    assert "Hopper GPUs only" in str(obstacle_of(layer(op), kernel))  # Of this machine.


@every_op
@every_kernel
def test_kernels_are_of_programs_that_may_have_them(
    op: Op, kernel: str, on_h200: None, said: Callable
) -> None:
    """In others it is said of those that are requested, and auto chooses among the rest."""
    why = (
        f"{kernel} is not possible: collectives at the same time, as this program is compiled,"
        " allow no kernel to address peers' memory; compile with"
        " collective_matmul.overlap_jit(..., peer_kernels=True)"
    )
    measured = "measured: 4 µs bulk, 2 µs ring_direct"
    with peer_kernels_allowed(False):
        assert decide(layer(op), None) == ("ring_direct", measured)
        assert said() == []
        assert decide(layer(op), kernel) == ("ring_direct", f"fallback: {why}; {measured}")
    assert said() == [f"{op} falls back to ring_direct: {why}"]


@every_op
def test_no_kernel_is_planned_for_programs_that_may_have_none(
    op: Op, on_h200: None, monkeypatch: Patch
) -> None:
    asked = []
    monkeypatch.setattr(selection, "obstacle_of", lambda site, name: asked.append(name))
    for may_have, planned in ((False, False), (True, True)):
        with peer_kernels_allowed(may_have):
            decide(layer(op), None)
        assert all((name in asked) == planned for name in ("fused", "one_shot"))


@every_op
@every_kernel
def test_kernels_are_of_one_process(op: Op, kernel: str, on_h200: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert str(obstacle_of(layer(op), kernel)).startswith("2 processes: ")


@every_op
@every_kernel
@pytest.mark.parametrize("size", [1, 2])
def test_kernels_are_not_divided_over_automatic_axes(op: Op, kernel: str, size: int) -> None:
    with tracing_for(H200, data=size):
        found = obstacle_of(layer(op), kernel)
    assert (found is None) == (size == 1)
    assert found is None or "automatic mesh axes" in found


@every_op
def test_of_kernels_that_can_and_are_not_predicted_it_is_said_why(
    op: Op, on_h200: None, said: Callable, monkeypatch: Patch
) -> None:
    """Where they cannot, nobody misses a measurement."""
    seconds = {name: value for name, value in SECONDS.items() if name != "fused"}
    found = Prediction(seconds, 0.02, "measured")
    monkeypatch.setattr(selection.tables, "look_up", lambda *args: found)
    without = "measured: 4 µs bulk, 2 µs ring_direct"
    assert decide(layer(op), None) == (
        "ring_direct",
        f"{without}; fused was not measured here",
    )
    float32 = dataclasses.replace(layer(op), dtype=np.dtype("float32"))
    assert decide(float32, None) == ("ring_direct", without)
    assert decide(layer(op), "ring") == ("ring", "requested")
    with peer_kernels_allowed(False):
        assert decide(layer(op), None) == ("ring_direct", without)
    assert said() == []


@every_op
@every_kernel
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0)])
def test_only_newer_versions_have_kernels(
    op: Op, kernel: str, version: tuple[int, ...], on_h200: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    found = obstacle_of(layer(op), kernel)
    assert (found is None) == (version >= (0, 11))
    assert found is None or found.endswith(": these kernels need 0.11 or newer")


@pytest.mark.parametrize(
    ("op", "contracted", "columns", "possible"),
    [
        ("all_gather_matmul", 192, 96, True),
        ("all_gather_matmul", 160, 96, False),
        ("all_gather_matmul", 192, 80, False),
        ("matmul_reduce_scatter", 96, 160, True),
        ("matmul_reduce_scatter", 80, 192, False),
        ("matmul_reduce_scatter", 96, 144, False),
        ("matmul_all_reduce", 96, 160, True),
        ("matmul_all_reduce", 80, 192, False),
        ("matmul_all_reduce", 96, 144, False),
    ],
)
@pytest.mark.parametrize("transpose_w", [False, True])
def test_sizes_that_kernels_do_not_take(
    op: Op, contracted: int, columns: int, possible: bool, transpose_w: bool, on_h200: None
) -> None:
    """However the weights lie, except that a sum on all devices has no transposed ones."""
    operands = ((64, contracted), (contracted, columns))
    lies_transposed = transpose_w and op != "matmul_all_reduce"
    found = obstacle_of(
        Site(op, (operands,), BFLOAT16, AXIS, 4, transpose_w=lies_transposed), "fused"
    )
    assert (found is None) == possible
    assert found is None or "pad them" in found


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_kernels_are_asked_about_the_site_as_it_lies(op: Op, monkeypatch: Patch) -> None:
    """Measured, it has all its rows in one dimension, and weights as a model has them."""
    asked = []

    def why_not(x: Any, ws: Any, devices: int, *, dimension: int, transpose_w: bool) -> str:
        (x,) = x if isinstance(x, list) else [x]
        asked.append((x.shape, ws[0].shape, devices, dimension, transpose_w))
        return "no"

    monkeypatch.setattr(obstacles.fused_gather, "all_gather_unsupported_reason", why_not)
    monkeypatch.setattr(obstacles.fused_scatter, "reduce_scatter_unsupported_reason", why_not)
    operands = (((2, 64, 96), (96, 192)),)
    site = Site(op, operands, BFLOAT16, AXIS, 4, dimension=1, transpose_w=True)
    for each in (site, site.flat, dataclasses.replace(site, keep_gathered=True).flat):
        assert obstacle_of(each, "fused") == "no"
    assert asked == [
        ((2, 64, 96), (192, 96), 4, 1, True),
        ((128, 96), (96, 192), 4, 0, False),
        ((128, 96), (192, 96), 4, 0, True),
    ]


@pytest.mark.parametrize("rows", [6, 8])
def test_a_kernel_sums_rows_that_a_ring_cannot_divide(rows: int, on_h200: None) -> None:
    site = site_of("matmul_all_reduce", rows, 512, 512)
    assert (obstacle_of(site, "ring") is None) == (rows % 4 == 0)
    assert obstacle_of(site, "fused") is None


@every_kernel
def test_an_einsum_that_is_no_matmul_has_no_kernel(
    kernel: str, on_h200: None, said: Callable, monkeypatch: Patch
) -> None:
    for other in PEER_KERNELS.keys() - {kernel}:
        monkeypatch.delitem(SECONDS, other)
    einsum = Einsum("sd,sf->df", ((256, 512), (1024, 64)), True)
    site = layer("all_gather_matmul", einsum=einsum, dimension=None)
    name, reason = decide(site, kernel)
    why = f"{kernel} is not possible: 'sd,sf->df' is no matmul, and these kernels do nothing else"
    assert (name, reason.startswith(f"fallback: {why}; ")) == ("ring_direct", True)
    assert said() == [f"all_gather_matmul falls back to ring_direct: {why}"]
    assert obstacle_of(dataclasses.replace(site, einsum=None, dimension=0), kernel) is None


@every_op
@every_kernel
def test_nothing_to_do_is_a_reason(op: Op, kernel: str, on_h200: None) -> None:
    assert "nothing to communicate" in str(obstacle_of(layer(op, devices=1), kernel))
    assert "nothing to multiply" in str(obstacle_of(site_of(op, 0, 1024, 1024), kernel))


@every_op
def test_bulk_can_always(op: Op) -> None:
    assert obstacle_of(layer(op), "xla") is None
