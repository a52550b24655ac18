"""Metrics equal numbers computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from train.log.metrics import (
    Meter,
    Record,
    model_flops_per_token,
    peak_flops,
    peak_memory_bytes,
)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def device(kind: str = "NVIDIA H200", peak_bytes: int | None = 7) -> Any:
    stats = None if peak_bytes is None else {"peak_bytes_in_use": peak_bytes, "bytes_in_use": 1}
    return SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)


def test_model_flops_are_the_matmuls_of_one_sequence_over_its_tokens() -> None:
    layers, heads, head_dim, tokens, parameters = 2, 3, 5, 8, 1000
    forward = 2 * parameters * tokens
    for _query in range(tokens):  # Scores and weighted values, each over half the keys on average.
        forward += layers * heads * 2 * (2 * head_dim * tokens / 2)
    assert tokens * model_flops_per_token(
        matmul_parameters=parameters,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        sequence_length=tokens,
    ) == pytest.approx(3 * forward)


def test_model_flops_of_llama3_8b() -> None:
    """7.50e9 matmul parameters are 45.0 GFLOP; attention at 4096 tokens adds 3.2 GFLOP."""
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    flops = model_flops_per_token(
        matmul_parameters=32 * block + 4096 * 128256,
        layers=32,
        heads=32,
        head_dim=128,
        sequence_length=4096,
    )
    assert flops == pytest.approx(48.25e9, rel=1e-3)


def test_peak_flops_are_known_or_none() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    # The name of a MIG slice starts with the name of the whole device.
    for unknown in ("cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H900"):
        assert peak_flops(unknown) is None


def test_peak_memory_is_known_or_none() -> None:
    assert peak_memory_bytes(device(peak_bytes=7)) == 7
    assert peak_memory_bytes(device(peak_bytes=None)) is None
    assert peak_memory_bytes(jax.devices("cpu")[0]) is None


def test_the_record_is_the_mean_over_its_interval() -> None:
    clock = Clock()
    meter = Meter(tokens_per_step=800, flops_per_token=2e9, devices=4, device=device(), clock=clock)

    def batches(waits: list[float]) -> Any:
        for wait in waits:
            clock.now += wait
            yield "batch"

    reading = batches([0.5, 0.25, 0.0])
    for _ in range(2):
        assert meter.read(reading) == "batch"
        clock.now += 1.0
        meter.step_done()
    record = meter.record(2, 3.0, 0.5, 1e-3)
    assert record == Record(
        step=2,
        loss=3.0,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens_per_second_per_device=200 / 1.375,
        tflops_per_device=pytest.approx(200 / 1.375 * 2e9 / 1e12),  # type: ignore[arg-type]
        mfu=pytest.approx(200 / 1.375 * 2e9 / 989.4e12),  # type: ignore[arg-type]
        memory_bytes=7,
        step_seconds=1.375,
        data_seconds=0.375,
    )
    meter.read(reading)
    clock.now += 0.5
    meter.step_done()
    record = meter.record(3, 2.0, 0.5, 1e-3)
    assert (record.step_seconds, record.data_seconds) == (0.5, 0.0)
    assert record.tokens_per_second_per_device == 400


def test_time_before_the_start_does_not_count() -> None:
    clock = Clock()
    meter = Meter(
        tokens_per_step=8, flops_per_token=1.0, devices=1, device=device("cpu", None), clock=clock
    )
    clock.now += 60
    meter.start()
    clock.now += 2
    meter.step_done()
    record = meter.record(1, 1.0, 1.0, 1e-3)
    assert record.step_seconds == 2
    assert record.mfu is None
    assert record.memory_bytes is None


def test_time_of_a_pause_does_not_count() -> None:
    clock = Clock()
    meter = Meter(
        tokens_per_step=8, flops_per_token=1.0, devices=1, device=device("cpu", None), clock=clock
    )
    clock.now += 2
    meter.step_done()
    with meter.paused():
        clock.now += 60
    clock.now += 4
    meter.step_done()
    assert meter.record(2, 1.0, 1.0, 1e-3).step_seconds == 3
