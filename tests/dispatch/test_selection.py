"""Which backend is chosen for a site, the warnings about it, and the record of decisions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import hardware
from collective_matmul.dispatch import assessment, selection
from collective_matmul.dispatch.recording import Decision, record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.dispatch.tables import table_files
from collective_matmul.log import warn_once
from collective_matmul.ops.matmul import xla
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.ops.matmul.ring.backend import RINGS
from collective_matmul.peer_access import peer_kernels_allowed
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.dispatch.tables.example_tables import entry, layer, measure_as, table_of
from tests.reference import AXIS, OPS, Case

every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture
def on_gpus() -> Iterator[None]:
    with tracing_for(H200):
        yield


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kind of device was measured."""
    monkeypatch.setattr(table_files, "known", lambda kind: [])


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that were logged before may be logged again."""
    monkeypatch.setattr(selection, "warn_once", functools.cache(warn_once.__wrapped__))


def decide(site: Site, *requested: str) -> Decision:
    with record_decisions() as decisions:
        name = choose(site, requested or None).name
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
        case,
        "matmul_reduce_scatter",
        ((3, 8, 3), (3, 5)),
        ((3, 8, 14), (14, 5)),
        co_gathered=(3, 4, 5),
    )
    mesh = make_mesh({AXIS: 2})
    assert trace(case, mesh, gradients=False) == [Decision(gather, "ring", "requested")]
    decisions = trace(case, mesh, gradients=True)
    assert decisions == [
        Decision(gather, "ring", "requested"),
        Decision(scatter, "ring", "requested"),
    ]
    assert [(d.site.dimension, d.site.transpose_w) for d in decisions] == [(1, False), (1, True)]


def test_sites_of_a_scatter_and_its_backward(make_mesh: MeshFactory) -> None:
    case = Case("matmul_reduce_scatter", "ring", 2, (3, 8), 10, ((4, 7),), dimension=1)
    scatter = site_from(case, "matmul_reduce_scatter", ((3, 8, 5), (5, 28)))
    gather = site_from(case, "all_gather_matmul", ((3, 4, 28), (28, 5)), keep_gathered=True)
    decisions = trace(case, make_mesh({AXIS: 2}), gradients=True)
    assert decisions == [
        Decision(scatter, "ring", "requested"),
        Decision(gather, "ring", "requested"),
    ]
    assert [(d.site.dimension, d.site.transpose_w) for d in decisions] == [(1, False), (1, True)]


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
        choose(first, ("xla",))
        with record_decisions() as inner:
            choose(second, ("xla",))
    choose(first, ("xla",))
    assert [taken.site for taken in outer] == [first, second]
    assert [taken.site for taken in inner] == [second]


def test_a_recorder_ends_with_an_error() -> None:
    with pytest.raises(KeyError), record_decisions() as decisions:
        raise KeyError
    choose(site_of("all_gather_matmul", 8, 8, 8), ("xla",))
    assert decisions == []


@every_op
@pytest.mark.parametrize("implementation", ["xla", *RINGS])
def test_a_request_is_followed(op: Op, implementation: str) -> None:
    taken = decide(site_of(op, 8, 8, 8), implementation)
    assert (taken.implementation, taken.reason) == (implementation, "requested")


@every_op
def test_one_device_has_nothing_to_communicate(op: Op, on_gpus: None) -> None:
    taken = decide(site_of(op, 1 << 16, 8192, 8192, devices=1))
    assert (taken.implementation, taken.reason) == ("xla", "one device: nothing to communicate")


@every_op
def test_the_cpu_has_nothing_to_run_under_a_matmul(op: Op) -> None:
    taken = decide(site_of(op, 1 << 16, 8192, 8192))
    assert (taken.implementation, taken.reason) == ("xla", "on cpu nothing runs under a matmul")


def predicted(site: Site) -> tuple[float, float]:
    """The model's seconds of XLA and of the ring."""
    found = [BACKENDS[name].predict(site) for name in ("xla", "ring")]
    xla_prediction, ring = found
    assert xla_prediction is not None and ring is not None
    return xla_prediction.seconds, ring.seconds


def test_the_reason_is_the_prediction(on_gpus: None, untuned: None) -> None:
    site = site_of("all_gather_matmul", 8192, 8192, 28672)
    reference, ring = predicted(site)
    taken = decide(site)
    assert (taken.implementation, taken.seconds) == ("ring", pytest.approx(ring))
    assert taken.reference_seconds == pytest.approx(reference)
    assert taken.reason == f"cost model: {reference * 1e6:.0f} µs xla, {ring * 1e6:.0f} µs ring"


@pytest.mark.parametrize(("gain", "name"), [(1.01, "xla"), (1.03, "ring_direct")])
def test_a_ring_that_hardly_gains_is_not_chosen(
    gain: float, name: str, on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, {"xla": 1e-4, "ring": 1.1e-4, "ring_direct": 1e-4 / gain})
    taken = decide(site_of("all_gather_matmul", 8192, 8192, 8192))
    assert taken.implementation == name
    doubt = ": a gain of 1.0% by ring_direct is less than the 2% by which such times may be wrong"
    assert taken.reason == (
        f"measured: 100 µs xla, {100 / gain:.0f} µs ring_direct" + doubt * (name == "xla")
    )


def test_a_backend_that_is_gone_is_not_chosen(
    on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = layer(8192)
    measured = table_of((site, entry(xla=3.0, ring=2.0, gone=1.0)))
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", measured)])
    assert decide(site).implementation == "ring"


@pytest.mark.parametrize("requested", [(), ("xla",)])
def test_what_cannot_be_chosen_hides_nothing_that_can(
    requested: tuple[str, ...], on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the only entry, the gain of a kernel would say nothing, not of rings either."""
    measured = table_of((layer(1024), entry(xla=200.0, ring=250.0, fused=150.0)))
    monkeypatch.setattr(table_files, "known", lambda kind: [("a table", measured)])
    taken = decide(layer(512), *requested)
    assert taken.implementation == "xla"
    assert taken.reference_seconds == pytest.approx(100e-6)


@pytest.mark.needs("fused", "one_shot")
@pytest.mark.parametrize(
    ("rows", "fused", "chosen", "basis"),
    [
        (8192, 0.5, "fused", "measured"),
        (8192, 1.1, "ring", "measured"),
        (64, 1.1, "xla", "measured"),  # Too few for a ring.
    ],
)
def test_where_fused_alone_was_measured_a_ring_may_gain(
    rows: int, fused: float, chosen: str, basis: str, on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = 1e6 * predicted(layer(rows))[0]
    measured = table_of((layer(rows), entry(xla=reference, fused=fused * reference)))
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", measured)])
    monkeypatch.setattr(assessment, "unsupported_reason", lambda site, name: None)
    monkeypatch.setattr(BACKENDS["one_shot"], "predict", lambda site: None)
    with peer_kernels_allowed(True):
        taken = decide(layer(rows))
    assert taken.implementation == chosen
    assert taken.reason.startswith(f"{basis} (here): ")
    assert "fused was not measured" not in taken.reason


@pytest.mark.needs("fused", "one_shot")
def test_times_are_relative_to_the_sites_own_measurement(
    on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain of a ring comes from a near entry, whose reference took longer."""
    measured = table_of(
        (layer(4096), entry(xla=100.0, fused=95.0)), (layer(3072), entry(xla=400.0, ring=200.0))
    )
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", measured)])
    monkeypatch.setattr(assessment, "unsupported_reason", lambda site, name: None)
    monkeypatch.setattr(BACKENDS["one_shot"], "predict", lambda site: None)
    with peer_kernels_allowed(True):
        taken = decide(layer(4096))
    assert taken.implementation == "ring"
    assert (taken.seconds, taken.reference_seconds) == pytest.approx((50e-6, 100e-6))
    assert taken.reason.startswith("measured (here): 100 µs xla, 50 µs ring (near what was")


def test_a_request_knows_the_predicted_times(on_gpus: None, untuned: None) -> None:
    site = site_of("all_gather_matmul", 8192, 8192, 28672)
    taken = decide(site, "ring")
    reference, ring = predicted(site)
    assert (taken.seconds, taken.reference_seconds) == pytest.approx((ring, reference))
    assert decide(site, "ring_direct").seconds is None


def test_gpus_that_nothing_is_known_of_get_xla_and_say_so_once(
    fresh_warnings: None, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = "NVIDIA A100-SXM4-40GB was not measured; collective_matmul.tune can"
    with tracing_for(AbstractDevice("NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu")):
        for _ in range(2):
            taken = decide(site_of("all_gather_matmul", 8192, 8192, 28672))
            assert (taken.implementation, taken.reason) == ("xla", f"fallback: {unknown}")
    assert warnings_of(caplog) == [f"all_gather_matmul falls back to xla: {unknown}"]


def test_a_part_of_the_name_of_a_gpu_gets_the_whole_one(fresh_warnings: None) -> None:
    with tracing_for(AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")):
        reason = decide(site_of("all_gather_matmul", 8192, 8192, 28672)).reason
    known = "NVIDIA H100 is not known; JAX's name is NVIDIA H100 80GB HBM3"
    assert reason == f"fallback: {known}"


def test_the_mesh_says_what_device_is_traced_for() -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    kinds = []
    jax.eval_shape(
        jax.shard_map(
            lambda x: (kinds.append(hardware.traced_device().device_kind), x)[1],
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
        ),
        jax.ShapeDtypeStruct((8,), "float32"),
    )
    assert kinds == ["NVIDIA H200"]
    assert hardware.traced_device().device_kind == jax.devices()[0].device_kind


def test_an_empty_array_has_nothing_to_multiply(on_gpus: None) -> None:
    taken = decide(site_of("all_gather_matmul", 0, 8, 8))
    assert (taken.implementation, taken.reason) == ("xla", "an empty array: nothing to multiply")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_rows_that_do_not_divide_fall_back_and_say_so_once(
    on_gpus: None, fresh_warnings: None, caplog: pytest.LogCaptureFixture
) -> None:
    site = site_of("matmul_all_reduce", 8190, 8192, 8192)
    unsupported = "8190 rows are not divisible by axis 'tensor' of size 4"
    reason = f"ring is not possible: {unsupported}"
    for _ in range(2):
        taken = decide(site)
        assert taken.implementation == "xla"
        assert taken.reason.startswith(f"fallback: {reason}; cost model: ")
    assert warnings_of(caplog) == [f"matmul_all_reduce falls back to xla: {reason}"]


@every_op
def test_rings_that_cannot_copy_between_peers_fall_back_and_say_so_once(
    op: Op,
    on_gpus: None,
    untuned: None,
    fresh_warnings: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "ring would hide nothing: its transfers go through NCCL"
    for rows in (4096, 8192):
        taken = decide(replace(site_of(op, rows, 8192, 8192), transport="nccl"))
        assert taken.implementation == "xla"
        assert taken.reason.startswith(f"fallback: {reason}; cost model: ")
    assert warnings_of(caplog) == [f"{op} falls back to xla: {reason}"]


@pytest.mark.parametrize("implementation", RINGS)
def test_a_named_ring_that_cannot_run_raises(implementation: str) -> None:
    with (
        record_decisions() as decisions,
        pytest.raises(ValueError, match=rf"^implementation='{implementation}': 6 rows are not"),
    ):
        choose(site_of("matmul_all_reduce", 6, 8, 8), (implementation,))
    assert decisions == []


@every_op
def test_no_xla_collective_where_it_would_gather_what_the_compiler_shards(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla, "partly_automatic", lambda: True)
    taken = decide(site_of(op, 64, 64, 64))
    if op == "matmul_all_reduce":  # An all-reduce XLA can cut.
        assert taken.implementation == "xla"
    else:
        assert taken.implementation == "ring_direct"
        assert "would gather what the automatic mesh axes shard" in taken.reason
