"""Which sites one-shot collectives can execute, how long they take, and where that decides."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from collective_matmul.dispatch import selection
from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.log import warn_once
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.matmul_cost import matmul_seconds
from collective_matmul.ops.matmul.one_shot import backend as one_shot
from collective_matmul.ops.matmul.one_shot import exchange_kernel
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.peer_access import peer_kernels_allowed
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.dispatch.tables.example_tables import measure_as
from tests.reference import OPS

every_op = pytest.mark.parametrize("op", OPS)
Patch = pytest.MonkeyPatch


def choose(site: Site, *requested: str) -> str:
    return selection.choose(site, requested or None).name


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch: Patch) -> Iterator[None]:
    """In programs that may have kernels, and by a JAX that has them."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(selection, "warn_once", functools.cache(warn_once.__wrapped__))
    with tracing_for(H200), peer_kernels_allowed(True):
        yield


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0)])
@every_op
def test_only_newer_versions(op: Op, version: tuple[int, ...], monkeypatch: Patch) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    found = unsupported_reason(site_of(op, 64, 512, 1024), "one_shot")
    assert (found is None) == (version >= (0, 11))
    assert found is None or "these kernels need 0.11 or newer" in found


def test_all_that_is_sent_must_fit() -> None:
    """An all-reduce sends only a share of the sum in each exchange."""
    columns = 1024
    rows = exchange_kernel.MOST_BYTES // 2 // columns
    for more, possible in ((0, True), (1, False)):
        gather = site_of("all_gather_matmul", 4 * (rows + more), columns, 512)
        scatter = site_of("matmul_reduce_scatter", 4 * (rows + more), 512, columns)
        reduce = site_of("matmul_all_reduce", 4 * (rows + more), 512, columns)
        co_gathering = site_of(
            "matmul_reduce_scatter", 64, 512, columns, co_gathered=(rows + more, columns)
        )
        for site in (gather, scatter, reduce, co_gathering):
            assert (unsupported_reason(site, "one_shot") is None) == possible, site


@every_op
def test_too_much_for_one_shot_is_reported_once(
    op: Op, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is requested before another, and where it was measured to be the fastest."""
    measure_as(monkeypatch, {"xla": 4e-6, "ring": 2e-6, "one_shot": 1e-6, "fused": 3e-6})
    sizes = (8192, 4096, 1024) if op == "all_gather_matmul" else (8192, 1024, 4096)
    sent = (2048, 4096) if op == "all_gather_matmul" else (2048 * 4096,)
    why = (
        f"one_shot is not possible: {sent} are {2 * 2048 * 4096} bytes for each peer, and one shot"
        f" takes {exchange_kernel.MOST_BYTES}"
    )
    with record_decisions() as decisions:
        assert choose(site_of(op, *sizes)) == "ring"
    assert decisions[0].reason == f"fallback: {why}; measured: 4 µs xla, 2 µs ring"
    for _ in range(2):
        assert choose(site_of(op, *sizes), "one_shot", "ring") == "ring"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{op} falls back to ring: {why}"]


@every_op
@pytest.mark.parametrize("measured", [False, True])
def test_few_rows_where_programs_may_have_kernels(
    op: Op, measured: bool, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the cost model, beside what was measured or alone."""
    measure_as(monkeypatch, {"xla": 6e-5, "fused": 7e-5} if measured else {})

    def chosen(rows: int, *requested: str) -> str:
        sizes = (4096, 14336) if op == "all_gather_matmul" else (14336, 4096)
        return choose(site_of(op, rows, *sizes), *requested)

    assert chosen(64) == "one_shot"
    assert chosen(1 << 14) != "one_shot"
    with peer_kernels_allowed(False):
        assert chosen(64) == "xla"
    assert not caplog.records
    assert chosen(1024, "one_shot") == "one_shot"
    monkeypatch.setattr(one_shot, "ERROR", 10.0)
    assert chosen(64) != "one_shot"


@every_op
def test_floats_of_few_rows_warn_of_nothing(
    op: Op, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a request, or a measurement, makes one_shot a backend that is missed."""
    measure_as(monkeypatch, {})
    site = dataclasses.replace(site_of(op, 64, 4096, 4096), dtype=np.dtype("float32"))
    assert BACKENDS["one_shot"].predict(site) is None
    assert choose(site) == "xla"
    assert not caplog.records


def test_the_basis_of_a_modelled_backend_is_the_model(monkeypatch: Patch) -> None:
    measure_as(monkeypatch, {"xla": 6e-5, "ring": 7e-5})
    with record_decisions() as decisions:
        assert choose(site_of("all_gather_matmul", 64, 4096, 14336)) == "one_shot"
    assert decisions[0].reason.startswith("measured: 60 µs xla, ")
    assert " µs one_shot (cost model)" in decisions[0].reason


def test_the_model_is_not_of_other_gpus(monkeypatch: Patch) -> None:
    measure_as(monkeypatch, {"xla": 6e-5, "ring": 7e-5})
    monkeypatch.setattr(one_shot, "rates", lambda: None)
    assert choose(site_of("all_gather_matmul", 64, 4096, 14336)) == "xla"


def one_exchange(elements: int, devices: int = 4) -> float:
    return one_shot.exchange_seconds(2 * elements, devices)


@pytest.mark.parametrize(
    ("site", "exchanges"),
    [
        (site_of("all_gather_matmul", 64, 512, 1024), [16 * 512]),
        (site_of("all_gather_matmul", 64, 512, 1024, keep_gathered=True), [16 * 512]),
        (site_of("matmul_reduce_scatter", 64, 512, 1024), [16 * 1024]),
        (
            site_of("matmul_reduce_scatter", 64, 512, 1024, co_gathered=(16, 96)),
            [16 * 1024, 16 * 96],
        ),
        (site_of("matmul_all_reduce", 6, 512, 1024), [6 * 1024]),
        # In two shots, each of a quarter.
        (site_of("matmul_all_reduce", 1024, 512, 1024), [256 * 1024] * 2),
    ],
    ids=str,
)
def test_every_exchange_takes_its_time(site: Site, exchanges: list[int]) -> None:
    expected = sum(map(one_exchange, exchanges))
    assert one_shot._site_seconds(site) == pytest.approx(expected)
    predicted = BACKENDS["one_shot"].predict(site)
    assert predicted is not None
    multiplication = matmul_seconds(site.product_rows, *site.operands[0][1])
    if site.has_weight_gradient:
        k, n = site.operands[0][1]
        multiplication += matmul_seconds(k, site.product_rows, n)
    assert predicted.seconds == pytest.approx(multiplication + expected)
    assert predicted.relative_error == one_shot.ERROR


def test_two_devices_take_two_shots_only_where_one_is_too_small() -> None:
    """Two exchanges of half the data send as much between two devices, and start twice."""
    assert not one_shot.is_two_shot(exchange_kernel.MOST_BYTES, devices=2)
    assert one_shot.is_two_shot(exchange_kernel.MOST_BYTES + 1, devices=2)


def test_more_devices_and_more_bytes_take_longer() -> None:
    assert one_exchange(1 << 10) < one_exchange(1 << 20) < one_exchange(1 << 20, devices=8)
