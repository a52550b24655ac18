"""The log is complete, says what its run was, and is never overwritten."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import platform
import re
import resource
import signal
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.train.reports import RECORD, reporter
from tests.train.reports import run as run_with_writers
from train.config.config import MeshSizes
from train.log.log_file import LogFile, check_log_file, read_log
from train.log.metrics import Record
from train.log.run_record import run_record
from train.parallel.mesh import make_mesh

KEYS = [
    "event", "step", "loss", "grad_norm", "learning_rate", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "memory_bytes", "step_seconds", "data_seconds",
]  # fmt: skip


def run(records: list[Record], log: Path) -> None:
    run_with_writers(records, LogFile(log))


def read(log: Path) -> list[dict[str, Any]]:
    """Every line, none of which is more than JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = log.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_the_log_has_the_fields_as_keys(tmp_path: Path) -> None:
    run([RECORD, dataclasses.replace(RECORD, step=20, mfu=None, memory_bytes=None)], tmp_path / "l")
    first, second = read(tmp_path / "l")
    assert list(first) == KEYS
    assert first == {"event": "step", **RECORD.values()}
    assert (second["mfu"], second["memory_bytes"]) == (None, None)


def test_rates_say_of_how_many_devices_in_their_names() -> None:
    rates = {name for name in KEYS if "tokens" in name or "flops" in name}
    assert rates == {"tokens_per_second_per_device", "tflops_per_device"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_null_in_the_log(tmp_path: Path, value: float) -> None:
    run([dataclasses.replace(RECORD, loss=value, grad_norm=value)], tmp_path / "log")
    assert [(r["loss"], r["grad_norm"], r["step"]) for r in read(tmp_path / "log")] == [
        (None, None, 10)
    ]
    LogFile(tmp_path / "log").write("start", {"configuration": {"clip_norm": value, "x": [value]}})
    assert read(tmp_path / "log")[-1]["configuration"] == {"clip_norm": None, "x": [None]}


def test_each_line_is_on_disk_when_it_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with reporter(LogFile(log)) as reports:
        for step in (1, 2):
            reports.report(dataclasses.replace(RECORD, step=step))
            assert [r["step"] for r in read(log)] == list(range(1, step + 1))


def test_a_full_disk_loses_a_line_and_says_so(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: part of a line is written."""
    log, output = tmp_path / "log", io.StringIO()
    run([RECORD], log)
    before = log.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        run_with_writers([dataclasses.replace(RECORD, step=20)], LogFile(log), output=output)
        assert log.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert re.search(r"warning: log_file='.*log': step 20 is not in it \(File too large\)",
                     output.getvalue())  # fmt: skip
    run([RECORD], log)
    assert log.read_bytes() == 2 * before


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run([RECORD], log)
    check_log_file(str(log), resume=True)
    run([dataclasses.replace(RECORD, loss=2.25)], log)
    assert [(r["step"], r["loss"]) for r in read(log)] == [(10, 2.5), (10, 2.25)]
    assert [(r["step"], r["loss"]) for r in read_log(log)] == [(10, 2.25)]


def test_reading_leaves_out_what_a_resume_repeated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    file = LogFile(log)
    file.write("start", {"configuration": {"steps": 6}})
    for step in range(1, 7):
        file.write("step", {"step": step, "loss": 1.0})
    file.write("evaluation", {"step": 4, "loss": 5.0})
    file.write("evaluation", {"step": 6, "loss": 5.0})
    file.write("resume", {"step": 4})
    file.write("step", {"step": 5, "loss": 2.0})
    file.close(failed=False)
    with log.open("a") as appended:
        appended.write('{"event": "step", "step": 6, "lo')  # Killed while it was written.
    events = read_log(log)
    assert [e["event"] for e in events] == ["start", *["step"] * 4, "evaluation", "resume", "step"]
    assert {e["step"]: e["loss"] for e in events if e["event"] == "step"} == {
        1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0
    }  # fmt: skip


def test_logs_of_earlier_releases_are_read_with_current_names_and_appended_to(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    old = {"loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 7.0, "tflops": 3.0, "mfu": None}
    # A resumed run repeated step 2 and did not mark where it went on.
    lines = [{"step": step, **old, "loss": loss} for step, loss in ((1, 9), (2, 8), (3, 7), (2, 6))]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_log_file(str(log), resume=True)
    run([RECORD], log)
    *records, last = read_log(log)
    assert [(r["step"], r["loss"]) for r in records] == [(1, 9), (2, 6)]
    assert all(r["tokens_per_second_per_device"] == 7.0 for r in records)
    assert all(r["tflops_per_device"] == 3.0 and r["event"] == "step" for r in records)
    assert list(last) == KEYS


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
@pytest.mark.parametrize(
    "text", ["mine, without a newline at the end", '{"stepping": 1}', '{"events": []}', "{}"]
)
def test_a_file_that_is_not_a_log_is_never_written_to(
    tmp_path: Path, resume: bool, text: str
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    with pytest.raises(ValueError, match=r"log_file='.*notes.txt': holds .* give another name"):
        check_log_file(str(notes), resume=resume)
    assert notes.read_text() == text


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


def test_a_run_is_recorded_with_its_versions_and_hardware(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    record = run_record(
        {"steps": 6, "optimizer": {"clip_norm": math.inf}}, make_mesh(MeshSizes(2, 1, 4))
    )
    LogFile(tmp_path / "log").write("start", record)
    (start,) = read(tmp_path / "log")
    assert start["configuration"]["steps"] == 6
    assert start["versions"]["jax"] == jax.__version__
    assert start["versions"]["python"] == platform.python_version()
    assert start["hardware"]["mesh"] == {"data": 2, "fsdp": 1, "tensor": 4}
    assert start["hardware"]["device_kind"] == "cpu"
    assert start["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SECRET_TOKEN" not in json.dumps(start)
