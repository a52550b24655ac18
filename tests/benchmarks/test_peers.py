"""The processes that time others' libraries: what is asked of them, and what comes of it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import sys
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import peers
from benchmarks.fused.cases import Case, Op
from benchmarks.fused.peers import op_stack
from benchmarks.peers import MULTICAST_OFF, torch_stack
from benchmarks.stack import Stack

CASES = Stack(shapes=("tiny",), layers=2).cases()
OPS = [op_stack(Case(op, "tiny", 16), layers=3) for op in get_args(Op)]


def python(program: str, timeout: float = 60) -> str | None:
    return peers._run([sys.executable, "-c", program], timeout)


def test_without_pytorch_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = torch_stack(CASES, devices=2)
    assert (run.results, run.reason) == ([], "PyTorch is not installed")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"peers": ["jax"]}, r"peers=\['jax'\]: expected some of torch, torch_async_tp"),
        ({"variants": ()}, r"variants=\[\]: expected some of eager"),
        ({"devices": 3}, "devices=3: does not divide rows=64 of 'tiny forward'"),
        ({"devices": 0}, "devices=0: does not divide"),
    ],
)
def test_refusals(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        torch_stack(CASES, **{"devices": 2, **options})


@pytest.mark.parametrize("written", [[{"peer": "torch"}], None])
def test_what_was_measured_before_a_failure_is_kept(
    written: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], timeout: float) -> str:
        job = json.loads(Path(command[-1]).read_text())
        assert job["cases"][0] == {
            "name": "tiny forward",
            "shape": "tiny",
            "rows": 64,
            "features": 32,
            "hidden_features": 64,
            "direction": "forward",
            "layers": 2,
        }
        assert job["cases"][-1] == {
            "name": "matmul_all_reduce tiny M=16",
            "shape": "tiny",
            "rows": 16,
            "features": 256,
            "hidden_features": 512,
            "op": "matmul_all_reduce",
            "layers": 3,
        }
        assert timeout > job["limit_seconds"] == 7
        if written is not None:
            Path(job["output"]).write_text(json.dumps(written))
        return "it broke"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(peers, "_run", run)
    result = torch_stack([*CASES, *OPS], devices=2, limit_seconds=7)
    assert (result.results, result.reason) == (written or [], "it broke")


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


def test_pytorch_is_timed_and_checked() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    cases = [*CASES, *OPS]
    run = torch_stack(cases, devices=2, platform="cpu", variants=("eager",), groups=2)
    assert run.reason is None
    by_name = {(result["peer"], result["name"]): result for result in run.results}
    assert len(by_name) == 2 * len(cases)
    for case in cases:
        result = by_name["torch", case.name]
        assert len(result["samples"]) == 2
        assert math.isclose(result["milliseconds"]["median"], 500 * sum(result["samples"]))
        assert 0 < result["relative_error"] < 0.02
        # There is no symmetric memory of CPUs; one peer's failure costs the other nothing.
        expected = "no matmul_all_reduce" if "all_reduce" in case.name else "symm_mem"
        assert expected in by_name["torch_async_tp", case.name]["failure"]
    # Only a backward has something to do while it scatters.
    overlapped = [name for (_, name), found in by_name.items() if len(found.get("tried", {})) > 1]
    assert overlapped == ["tiny forward_backward"]
