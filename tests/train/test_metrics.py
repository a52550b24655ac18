"""Metrics equal numbers computed by hand; the log is complete and never overwritten."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from train.metrics import (
    Meter,
    Record,
    Reporter,
    check_log_file,
    model_flops_per_token,
    peak_flops,
    peak_memory_bytes,
)

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_bytes",
    "step_seconds",
    "data_seconds",
]
RECORD = Record(
    step=10,
    loss=2.5,
    grad_norm=0.75,
    learning_rate=3e-4,
    tokens_per_second=12345.6,
    tflops=412.5,
    mfu=0.417,
    memory_bytes=3 * 2**30,
    step_seconds=0.25,
    data_seconds=0.001,
)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def device(kind: str = "NVIDIA H200", peak_bytes: int | None = 7) -> Any:
    stats = None if peak_bytes is None else {"peak_bytes_in_use": peak_bytes, "bytes_in_use": 1}
    return SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)


def run(records: list[Record], log_file: Path | None = None, output: Any = None) -> str:
    output = io.StringIO() if output is None else output
    log = None if log_file is None else str(log_file)
    with Reporter(Console(file=output), log, first_step=0, steps=100) as reporter:
        for record in records:
            reporter.advance(record.step)
            reporter.report(record)
    return output.getvalue()


def read(log_file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = log_file.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


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
    meter = Meter(tokens_per_step=800, flops_per_token=2e9, devices=[device()] * 4, clock=clock)

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
        tokens_per_second=200 / 1.375,
        tflops=pytest.approx(200 / 1.375 * 2e9 / 1e12),  # type: ignore[arg-type]
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
    assert record.tokens_per_second == 400


def test_time_before_the_start_does_not_count() -> None:
    clock = Clock()
    meter = Meter(
        tokens_per_step=8, flops_per_token=1.0, devices=[device("cpu", None)], clock=clock
    )
    clock.now += 60
    meter.start()
    clock.now += 2
    meter.step_done()
    record = meter.record(1, 1.0, 1.0, 1e-3)
    assert record.step_seconds == 2
    assert record.mfu is None
    assert record.memory_bytes is None


def test_the_log_has_the_columns_as_keys(tmp_path: Path) -> None:
    run([RECORD, dataclasses.replace(RECORD, step=20, mfu=None, memory_bytes=None)], tmp_path / "l")
    first, second = read(tmp_path / "l")
    assert list(first) == KEYS
    assert first == dataclasses.asdict(RECORD)
    assert (second["mfu"], second["memory_bytes"]) == (None, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_null_in_the_log(tmp_path: Path, value: float) -> None:
    run([dataclasses.replace(RECORD, loss=value, grad_norm=value)], tmp_path / "log")
    assert [(r["loss"], r["grad_norm"], r["step"]) for r in read(tmp_path / "log")] == [
        (None, None, 10)
    ]


def test_each_line_is_on_disk_when_it_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Reporter(Console(file=io.StringIO()), str(log), first_step=0, steps=2) as reporter:
        for step in (1, 2):
            reporter.report(dataclasses.replace(RECORD, step=step))
            assert [r["step"] for r in read(log)] == list(range(1, step + 1))


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run([RECORD], log)
    check_log_file(str(log), resume=True)
    run([dataclasses.replace(RECORD, loss=2.25)], log)
    assert [(r["step"], r["loss"]) for r in read(log)] == [(10, 2.5), (10, 2.25)]


@pytest.mark.parametrize("length", [1, 20])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, length: int) -> None:
    log = tmp_path / "log"
    run([RECORD, RECORD], log)
    whole = log.read_bytes()
    for kept in (0, len(whole) // 2):
        log.write_bytes(whole[: kept + length])
        check_log_file(str(log), resume=True)
        run([RECORD], log)
        assert log.read_bytes() == whole[:kept] + whole[: len(whole) // 2]


def test_the_log_of_another_run_is_never_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run([RECORD], log)
    before = log.read_bytes()
    with pytest.raises(ValueError, match=r"log_file='.*log': holds an earlier run's log.*--resume"):
        check_log_file(str(log), resume=False)
    assert log.read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_that_is_not_a_log_is_never_written_to(tmp_path: Path, resume: bool) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine, without a newline at the end")
    with pytest.raises(ValueError, match=r"log_file='.*notes.txt': holds .* give another name"):
        check_log_file(str(notes), resume=resume)
    assert notes.read_text() == "mine, without a newline at the end"


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name, reason in (
        (".", "Is a directory"),
        ("none/log", "No such file or directory"),
        ("long" * 100, "File name too long"),
    ):
        with pytest.raises(ValueError, match=rf"log_file='.*{reason}; give a file to write"):
            check_log_file(str(tmp_path / name), resume=True)
    check_log_file(None, resume=False)
    check_log_file(str(tmp_path / "log"), resume=False)
    check_log_file(str(tmp_path / "log"), resume=False)  # Still empty.


def test_the_table_is_aligned_under_one_heading() -> None:
    unknown = dataclasses.replace(RECORD, step=100000, loss=0.5, mfu=None, memory_bytes=None)
    heading, *lines = run([RECORD, unknown, RECORD]).splitlines()
    for name in (
        "step",
        "loss",
        "grad norm",
        "learning rate",
        "tokens/s/device",
        "TFLOP/s/device",
        "MFU",
        "memory",
    ):
        assert heading.count(name) >= 1
    assert len(lines) == 3
    assert {len(line) for line in lines} == {len(heading)}
    for text in (" 10 ", "2.5000", "12,346", "412.5", "41.7%", "3.00 GiB", "0.250 s", "0.001 s"):
        assert text in lines[0]
    assert lines[1].count("n/a") == 2
    assert lines[0].index("41.7%") + 5 == lines[1].index("n/a") + 3, "right-aligned"


def test_a_progress_bar_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert "10/100" in run([RECORD], output=Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "10/100" not in run([RECORD])
