"""The processes that time PyTorch: what they are asked for, and what is read from them."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pytorch import MULTICAST_OFF, runner
from benchmarks.pytorch.runner import time_pytorch
from benchmarks.step.stack import Stack

SIZES = {"rows": 16, "features": 64, "hidden_features": 128, "layers": 3}
CASES: list[dict[str, Any]] = [
    *(
        {"name": case.name, **case.for_pytorch()}
        for case in Stack(shapes=("tiny",), layers=2, fp8=("tensorwise", "rowwise")).cases()
    ),
    *(
        {"name": op, "op": op, **SIZES}
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    ),
]
#: The candidates beside `NAMES` in the cases of layers.
FLOAT8 = (
    *("torch_fp8_tensorwise", "torch_async_tp_fp8_tensorwise"),
    *("torch_fp8_rowwise", "torch_async_tp_fp8_rowwise"),
)
SETTINGS: dict[str, Any] = {
    "devices": 2,
    "platform": "cpu",
    "dtype": "bfloat16",
    "groups": 2,
    "group_seconds": 0.01,
    "limit_seconds": 7,
}


def python(program: str, timeout: float = 60) -> str | None:
    return runner._run([sys.executable, "-c", program], timeout)


def test_without_pytorch_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert time_pytorch(CASES, **SETTINGS) == ([], "PyTorch is not installed")


@pytest.mark.parametrize("written", [[{"candidate": "torch"}], None])
def test_what_was_measured_before_a_failure_is_kept(
    written: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], timeout: float) -> str:
        job = json.loads(Path(command[-1]).read_text())
        assert job["cases"] == CASES
        assert timeout > job["limit_seconds"] == 7
        if written is not None:
            Path(job["output"]).write_text(json.dumps(written))
        return "it broke"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(runner, "_run", run)
    assert time_pytorch(CASES, **SETTINGS) == (written or [], "it broke")


@pytest.mark.parametrize("last", ["last", "CUDA Error: illegal"])
def test_a_failing_process_is_quoted(last: str, capfd: pytest.CaptureFixture[str]) -> None:
    reason = python(f"import sys; print('first', file=sys.stderr); sys.exit({last!r})")
    assert reason == f"PyTorch failed with exit status 1: {last}"
    reason = python(f"import sys; print({last!r}, file=sys.stderr); sys.exit('hint')")
    assert reason == f"PyTorch failed with exit status 1: {last if 'Error' in last else 'hint'}"
    assert "first" in capfd.readouterr().err


def test_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "on")
    assert python(f"import os; assert {MULTICAST_OFF}.items() <= os.environ.items()") is None


def test_processes_that_hang_are_ended_with_all_that_they_started(tmp_path: Path) -> None:
    """The grandchild holds the other end of a pipe open for as long as it lives."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "import os, signal\n"
        "os.fork()\n"
        f"descriptor = os.open({str(fifo)!r}, os.O_WRONLY)\n"
        "os.write(descriptor, b'.')\n"
        "signal.pause()\n"
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert python(program, timeout=0.5) == "PyTorch was stopped after 0.5 seconds"
    while select.select([reader], [], [], 10)[0]:
        if not os.read(reader, 64):
            break
    else:
        pytest.fail("something still holds the pipe")
    os.close(reader)


@pytest.fixture(scope="module")
def by_name() -> dict[tuple[str, str], Any]:
    """The results of all cases, by candidate and case."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    results, reason = time_pytorch(CASES, **{**SETTINGS, "limit_seconds": 90.0})
    assert reason is None
    return {(result["candidate"], result["name"]): result for result in results}


def test_pytorch_is_timed_and_checked(by_name: dict[tuple[str, str], Any]) -> None:
    assert len(by_name) == 2 * len(CASES) + 2 * len(FLOAT8)
    for case in CASES:
        result = by_name["torch", case["name"]]
        assert len(result["samples"]) == 2
        assert 0 < result["relative_error"] < 0.02
        # There is no symmetric memory of CPUs; the failure of one costs the other nothing.
        expected = "no matmul_all_reduce" if "all_reduce" in case["name"] else "symm_mem"
        assert expected in by_name["torch_async_tp", case["name"]]["failure"]
    # Only a backward has something to do while it scatters.
    overlapped = [
        name
        for (_, name), found in by_name.items()
        if any("overlapped" in variant for variant in found.get("tried", {}))
    ]
    assert overlapped == ["tiny forward_backward"]


@pytest.mark.parametrize("name", FLOAT8)
def test_layers_in_float8_compute_what_others_do(
    name: str, by_name: dict[tuple[str, str], Any]
) -> None:
    for direction in ("forward", "forward_backward"):
        result = by_name[name, f"tiny {direction}"]
        if importlib.util.find_spec("torchao") is None:
            assert "pip install torchao" in result["failure"]
            continue
        assert len(result["samples"]) == 2
        # Rounding to float8, which bfloat16 would be far from.
        assert 0.02 < result["relative_error"] < 0.15
