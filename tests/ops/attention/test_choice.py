"""Which kernel is chosen, and what is said about it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul import explain_attention
from collective_matmul.log import warn_once
from collective_matmul.ops.attention import choice, flash_attention

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
#: The reason that a machine without the package gives.
MISSING = "it needs the package"


def shapes(tokens: int, heads: tuple[int, int] = (16, 4), size: int = 128, batch: int = 1) -> Any:
    return [jax.ShapeDtypeStruct((batch, tokens, n, size), "bfloat16") for n in heads]


def on(device: AbstractDevice, *args: Any, **options: Any) -> Any:
    mesh = AbstractMesh((1,), ("tensor",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return explain_attention(*args, **options)


@pytest.fixture(params=[True, False], ids=["with the package", "without"])
def has_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    reason = None if request.param else f"{MISSING} dew-flash-attn-cu13"
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: reason)
    return request.param


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings that were logged before may be logged again."""
    monkeypatch.setattr(choice, "warn_once", functools.cache(warn_once.__wrapped__))
    monkeypatch.setattr(choice, "_WARNED", set())
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_the_fastest_that_is_possible(has_package: bool) -> None:
    decision = on(H200, *shapes(8192))
    assert decision.implementation == ("flash3" if has_package else "cudnn")
    assert "µs flash3" in decision.reason and "µs cudnn" in decision.reason
    if has_package:
        assert decision.missed is None
    else:
        assert decision.missed.startswith(
            "flash3 would take 77% of the time of cudnn, forward and backward, but it needs"
        )
        assert "flash3 would take" in str(decision)


def test_shapes_for_which_cudnn_was_measured_to_be_faster(has_package: bool) -> None:
    decision = on(H200, *shapes(512, (32, 8), 64, batch=16), max_segments=8)
    assert (decision.implementation, decision.missed) == ("cudnn", None)
    forward = on(H200, *shapes(512, (32, 8), 64, batch=16), max_segments=8, differentiated=False)
    assert forward.implementation == ("flash3" if has_package else "cudnn")


def test_heads_that_cudnn_does_not_take(has_package: bool) -> None:
    decision = on(H200, *shapes(8192, (8, 8), 256))
    assert decision.implementation == ("flash3" if has_package else "xla")


def test_devices_that_were_not_measured() -> None:
    decision = on(A100, *shapes(8192))
    assert (decision.implementation, decision.missed) == ("cudnn", None)
    assert decision.reason == "NVIDIA A100-SXM4-80GB was not measured"
    here = explain_attention(*shapes(8192))
    assert (here.implementation, here.reason) == ("xla", "the only kernel on cpu")


def test_requested_names(has_package: bool) -> None:
    for requested in (("flash3", "cudnn"), ("cudnn", "flash3")):
        decision = on(H200, *shapes(8192), implementation=requested)
        expected = next(name for name in requested if has_package or name != "flash3")
        assert decision.implementation == expected


def test_a_package_is_needed_where_the_devices_are(
    has_package: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for GPUs of another machine is traced without it, and the decision says so."""
    decision = on(H200, *shapes(8192), implementation="flash3")
    assert decision.implementation == "flash3"
    assert decision.missing == (None if has_package else f"{MISSING} dew-flash-attn-cu13")
    assert ("for another machine; here it needs" in str(decision)) != has_package
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if not has_package:
        with pytest.raises(ValueError, match=f"flash3 is not possible: {MISSING}.*pass .*'xla'"):
            on(H200, *shapes(8192), implementation="flash3")


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_without_the_package_one_warning_tells_the_gain(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of a program that is traced for the GPUs of another machine."""
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: MISSING)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    mesh = AbstractMesh((1,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    with (
        caplog.at_level(logging.WARNING, "collective_matmul"),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        for differentiated in (False, True):
            decision = explain_attention(*shapes(8192), differentiated=differentiated)
            assert choice.kernel_of(decision).name == "cudnn"
    warning = "attention by cudnn: flash3 would take 72% of the time of cudnn, forward, but"
    told = [f"{warning} {MISSING}"] if backend == "gpu" else []
    assert [record.getMessage() for record in caplog.records] == told


def test_every_entry_of_the_table_is_of_known_kernels() -> None:
    entries = choice._table("NVIDIA H100 80GB HBM3")
    assert len(entries) > 40
    assert all(entry.microseconds.keys() <= choice.KERNELS.keys() for entry in entries)
    assert choice._table("NVIDIA B200") == ()
