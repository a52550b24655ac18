"""What is chosen for which site, what is said about it, and what is recorded."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from collective_matmul.choose import Decision, Site, choose, decision, record_decisions
from collective_matmul.choose.cost_model import (
    HOST_SECONDS_PER_PERMUTE,
    bulk_seconds,
    ring_seconds,
)
from collective_matmul.choose.site import Op
from collective_matmul.implementations import IMPLEMENTATIONS
from tests.conftest import MeshFactory
from tests.reference import AXIS, OPS, Case

BFLOAT16 = np.dtype(jax.numpy.bfloat16)
every_op = pytest.mark.parametrize("op", OPS)


def site_of(op: Op, rows: int, contracted: int, columns: int, devices: int = 4) -> Site:
    """A layer of global sizes [rows, contracted] @ [contracted, columns], as one device sees it."""
    if op == "all_gather_matmul":
        shapes = (rows // devices, contracted), (contracted, columns // devices)
    else:
        shapes = (rows, contracted // devices), (contracted // devices, columns)
    return Site(op, (shapes,), BFLOAT16, AXIS, devices)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was said once before may be said again."""
    fresh = functools.cache(decision._say_once.__wrapped__)
    monkeypatch.setattr(decision, "_say_once", fresh)


def decide(site: Site, requested: str | None = None) -> Decision:
    with record_decisions() as decisions:
        name = choose(site, requested)
    (taken,) = decisions
    assert (taken.site, taken.implementation) == (site, name)
    return taken


def trace(case: Case, mesh: Mesh, *, gradients: bool) -> list[Decision]:
    """The decisions of tracing a case."""
    fun = case.sharded(mesh)

    def transpose(x, ws, dys):
        return jax.vjp(fun, x, ws)[1](dys)

    x, ws, dys = case.arrays()
    with record_decisions() as decisions:
        if gradients:
            jax.eval_shape(transpose, x, tuple(ws), tuple(dys))
        else:
            jax.eval_shape(fun, x, tuple(ws))
    return decisions


def site_from(case: Case, op: Op, *operands: tuple, **facts: Any) -> Site:
    return Site(op, operands, np.dtype(case.dtype), AXIS, case.devices, **facts)


def test_sites_of_a_gather_and_its_backward(make_mesh: MeshFactory) -> None:
    case = Case("all_gather_matmul", "ring", 2, (3, 8), 5, ((6,), (4, 7)), dimension=1)
    gather = site_from(case, "all_gather_matmul", ((3, 4, 5), (5, 3)), ((3, 4, 5), (5, 14)))
    scatter = site_from(
        case, "matmul_reduce_scatter", ((3, 8, 3), (3, 5)), ((3, 8, 14), (14, 5)), rider=(3, 4, 5)
    )
    mesh = make_mesh({AXIS: 2})
    assert trace(case, mesh, gradients=False) == [Decision(gather, "ring", "requested")]
    assert trace(case, mesh, gradients=True) == [
        Decision(gather, "ring", "requested"),
        Decision(scatter, "ring", "requested"),
    ]


def test_sites_of_a_scatter_and_its_backward(make_mesh: MeshFactory) -> None:
    case = Case("matmul_reduce_scatter", "ring", 2, (3, 8), 10, ((4, 7),), dimension=1)
    scatter = site_from(case, "matmul_reduce_scatter", ((3, 8, 5), (5, 28)))
    gather = site_from(case, "all_gather_matmul", ((3, 4, 28), (28, 5)), keep_gathered=True)
    assert trace(case, make_mesh({AXIS: 2}), gradients=True) == [
        Decision(scatter, "ring", "requested"),
        Decision(gather, "ring", "requested"),
    ]


def test_sites_of_an_all_reduce(make_mesh: MeshFactory) -> None:
    """Its backward communicates nothing that a matmul could hide: there is nothing to decide."""
    case = Case("matmul_all_reduce", "ring", 2, (3, 8), 10, ((7,),))
    site = site_from(case, "matmul_all_reduce", ((3, 8, 5), (5, 7)))
    assert trace(case, make_mesh({AXIS: 2}), gradients=True) == [
        Decision(site, "ring", "requested")
    ]


def test_every_recorder_hears_a_decision_and_none_later() -> None:
    first, second = site_of("all_gather_matmul", 8, 8, 8), site_of("all_gather_matmul", 4, 4, 4)
    with record_decisions() as outer:
        choose(first, "bulk")
        with record_decisions() as inner:
            choose(second, "bulk")
    choose(first, "bulk")
    assert [taken.site for taken in outer] == [first, second]
    assert [taken.site for taken in inner] == [second]


def test_a_recorder_ends_with_an_error() -> None:
    with pytest.raises(KeyError), record_decisions() as decisions:
        raise KeyError
    choose(site_of("all_gather_matmul", 8, 8, 8), "bulk")
    assert decisions == []


@every_op
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_request_is_followed(op: Op, implementation: str) -> None:
    taken = decide(site_of(op, 8, 8, 8), implementation)
    assert (taken.implementation, taken.reason) == (implementation, "requested")


@every_op
def test_one_device_has_nothing_to_communicate(op: Op, on_gpus: None) -> None:
    taken = decide(site_of(op, 1 << 16, 8192, 8192, devices=1))
    assert (taken.implementation, taken.reason) == ("bulk", "one device: nothing to communicate")


@every_op
def test_the_cpu_has_nothing_to_run_under_a_matmul(op: Op) -> None:
    taken = decide(site_of(op, 1 << 16, 8192, 8192))
    assert (taken.implementation, taken.reason) == ("bulk", "on cpu nothing runs under a matmul")


# The measured crossings of a ring and the collective, on 4 GPUs, in rows: below the first number
# the collective was faster, from the second on the ring.
@every_op
@pytest.mark.parametrize(
    ("contracted", "columns", "collective_wins", "ring_wins"),
    [(4096, 14336, 1024, 4096), (8192, 28672, 512, 2048)],
)
def test_the_prediction_has_the_measured_crossing(
    op: Op, contracted: int, columns: int, collective_wins: int, ring_wins: int, on_gpus: None
) -> None:
    if op != "all_gather_matmul":
        contracted, columns = columns, contracted
    rows = [64 << doubling for doubling in range(9)]
    chosen = {r: decide(site_of(op, r, contracted, columns)).implementation for r in rows}
    if op == "matmul_all_reduce":  # The second half of its communication is never hidden.
        assert chosen[64] == "bulk"
        assert chosen[16384] == "ring"
    else:
        assert all(chosen[r] == "bulk" for r in rows if r <= collective_wins)
        assert all(chosen[r] == "ring" for r in rows if r >= ring_wins)


def test_the_reason_is_the_prediction(on_gpus: None) -> None:
    site = site_of("all_gather_matmul", 8192, 8192, 28672)
    microseconds = f"{bulk_seconds(site) * 1e6:.0f}", f"{ring_seconds(site) * 1e6:.0f}"
    expected = "predicted {} µs bulk, {} µs ring".format(*microseconds)
    assert decide(site).reason == expected


@every_op
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_costs_the_host_its_permutes(op: Op, devices: int) -> None:
    assert ring_seconds(site_of(op, 8, 8, 8, devices)) >= (devices - 1) * HOST_SECONDS_PER_PERMUTE


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_rows_that_do_not_divide_fall_back_and_say_so_once(
    on_gpus: None, nothing_said: None, caplog: pytest.LogCaptureFixture
) -> None:
    site = site_of("matmul_all_reduce", 8190, 8192, 8192)
    reason = "8190 rows are not divisible by axis 'tensor' of size 4"
    for _ in range(2):
        taken = decide(site)
        assert (taken.implementation, taken.reason) == ("bulk", reason)
    assert warnings_of(caplog) == [f"matmul_all_reduce falls back to bulk: {reason}"]


@every_op
def test_several_processes_fall_back_and_say_so_once(
    op: Op,
    on_gpus: None,
    nothing_said: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    reason = "copies between GPUs need all of them in one process"
    for rows in (4096, 8192):
        taken = decide(site_of(op, rows, 8192, 8192))
        assert (taken.implementation, taken.reason) == ("bulk", reason)
    assert warnings_of(caplog) == [f"{op} falls back to bulk: {reason}"]


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS.keys() - {"bulk"}))
def test_a_named_ring_that_cannot_run_raises(implementation: str) -> None:
    with (
        record_decisions() as decisions,
        pytest.raises(ValueError, match=rf"^implementation='{implementation}': 6 rows are not"),
    ):
        choose(site_of("matmul_all_reduce", 6, 8, 8), implementation)
    assert decisions == []


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_costs_of_a_site(devices: int) -> None:
    """Global sizes: 2 M K N operations over all devices, D - 1 of D parts of what is exchanged."""
    rows, contracted, columns, itemsize = 64, 32, 16, 2
    exchanged = {
        "all_gather_matmul": rows * contracted * (devices - 1) // devices,
        "matmul_reduce_scatter": rows * columns * (devices - 1) // devices,
        "matmul_all_reduce": 2 * rows * columns * (devices - 1) // devices,
    }
    for op in OPS:
        site = site_of(op, rows, contracted, columns, devices)
        assert site.flops * devices == 2 * rows * contracted * columns
        assert site.bytes_communicated == exchanged[op] * itemsize
        assert site.rows == (rows // devices if op == "all_gather_matmul" else rows)


def test_costs_of_several_weights_and_a_rider() -> None:
    x, rider = (2, 6, 4), (2, 2, 5)
    site = Site(
        "matmul_reduce_scatter", ((x, (4, 5)), ((2, 6, 3), (3, 5))), BFLOAT16, AXIS, 3, rider
    )
    assert site.flops == 2 * (2 * 6 * 4 * 5 + 2 * 6 * 3 * 5)
    # One sum is exchanged for both, and the rider is passed on twice.
    assert site.bytes_communicated == 2 * (2 * (2 * 2 * 5) + 2 * math.prod(rider))


def test_a_site_reads_well() -> None:
    site = Site("all_gather_matmul", (((2, 3), (3, 4)), ((2, 3), (3, 5))), BFLOAT16, AXIS, 4)
    assert str(site) == (
        "all_gather_matmul [2, 3] @ [3, 4], [2, 3] @ [3, 5] bfloat16 over 'tensor'"
    )


@every_op
def test_no_bulk_collective_where_it_would_gather_what_the_compiler_shards(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "partly_automatic", lambda: True)
    taken = decide(site_of(op, 64, 64, 64))
    if op == "matmul_all_reduce":  # An all-reduce XLA can cut.
        assert taken.implementation == "bulk"
    else:
        assert taken.implementation == "ring_direct"
        assert "would gather what the automatic mesh axes shard" in taken.reason
