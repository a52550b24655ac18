"""PyTorch's times stand beside those of the kernels, or else why there are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command_line
from benchmarks.communication import AXIS
from benchmarks.fused import kernels, peers
from benchmarks.fused.apart import Said
from benchmarks.fused.cases import Case
from benchmarks.fused.peers import time_peers
from benchmarks.peers import PeerRun
from benchmarks.settings import Settings

RUN = (
    "fused --platform cpu --models tiny --rows 16 --repeats 0 --groups 3 --peers"
    " --ops all_gather_matmul matmul_all_reduce --contenders bulk ceiling"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list, dict[str, Any]]]:
    """What PyTorch was asked for. It has times of gathers, but not by its own fused operator."""
    asked = []

    def torch_stack(stacks, **settings):
        asked.append((stacks, settings))
        results = []
        for stack in stacks:
            if stack.op == "all_gather_matmul":
                found = {"name": stack.name, "peer": "torch", "options": "eager"}
                tried = {"CUDA graph": 6e-3, "eager": 4e-3}
                results += [
                    {**found, "samples": [4e-3, 2e-3, 8e-3], "tried": tried},
                    {"name": stack.name, "peer": "torch_async_tp", "failure": "not on this device"},
                ]
        return PeerRun(results, None)

    monkeypatch.setattr(peers, "torch_stack", torch_stack)
    return asked


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's process, that has measured all cases."""

    def run_apart(work, arguments, step_seconds, note):
        cases = arguments()[0]
        for case in cases:
            note(Said(case, ("mesh", AXIS), 2))
            note(Said(case, ("times", "all"), {"xla": [1.0, 2.0, 3.0], "ceiling": "too large"}))

    monkeypatch.setattr(kernels, "run_apart", run_apart)


def test_peers_stand_in_the_same_table(tmp_path: Path, asked: list, measured: None) -> None:
    command_line.main([*RUN.split(), "--layers", "4", "--output", str(tmp_path)])
    ((stacks, settings),) = asked
    assert [stack.op for stack in stacks] == ["all_gather_matmul", "matmul_all_reduce"]
    assert {stack.layers for stack in stacks} == {4}
    assert settings["devices"] == 2 and settings["groups"] == 3
    assert math.isfinite(settings["limit_seconds"])
    gather, total = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert gather["times"]["xla"] == [1.0, 2.0, 3.0]
    assert gather["times"]["torch"] == pytest.approx([750.0, 1000.0, 1500.0])
    assert gather["peers"]["torch"]["samples"] == [4e-3, 2e-3, 8e-3]
    assert gather["times"]["torch_async_tp"] == "not on this device"
    missing = "the time was over before its turn"
    assert total["times"]["torch"] == total["times"]["torch_async_tp"] == missing
    report = (tmp_path / "report.md").read_text()
    table, why, how = (part.strip() for part in report.partition("| µs per op")[2].split("\n## "))
    assert table.splitlines()[0] == "| wrong | bulk | ceiling | torch | torch_async_tp |"
    assert "| all_gather_matmul tiny M=16 |  | 2.0 | - | 1000.0 | - |" in table
    assert "- all_gather_matmul tiny M=16, ceiling: too large" in why
    assert "- all_gather_matmul tiny M=16, torch_async_tp: not on this device" in why
    assert f"- matmul_all_reduce tiny M=16, torch: {missing}" in why
    last = how.splitlines()[-1]
    assert last == "- all_gather_matmul tiny M=16, torch: eager 1000.0; CUDA graph 1500.0"


@pytest.mark.parametrize("more", [[], ["--peers", "--limit-seconds", "1e-9"]])
def test_who_is_not_asked_is_not_there(
    more: list[str], tmp_path: Path, asked: list, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the settings, or because the time is over."""
    monkeypatch.setattr(kernels.time, "time", lambda: 0.0)
    command_line.main([*RUN.replace("--peers", "").split(), *more, "--output", str(tmp_path)])
    assert not asked
    report = json.loads((tmp_path / "report.json").read_text())
    assert [set(case["times"]) for case in report["cases"]] == [{"xla", "ceiling"}] * 2
    assert "PyTorch" not in (tmp_path / "report.md").read_text()


def test_nothing_timed_is_nothing_to_compare_with(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main([*RUN.split(), "--layers", "0"])
    assert "peers=True: layers=0 times nothing" in capsys.readouterr().err


def test_devices_that_cannot_share_one_case_have_the_others(asked: list) -> None:
    odd, even, total = (
        Case("matmul_reduce_scatter", "tiny", 15),
        Case("all_gather_matmul", "tiny", 16),
        Case("matmul_all_reduce", "tiny", 15),
    )
    settings = Settings(platform="cpu")
    found = time_peers(
        [odd, even, total], devices=2, layers=1, settings=settings, seconds_left=math.inf
    )
    assert [stack.name for stack in asked[0][0]] == [even.name, total.name]
    assert "devices=2: does not divide rows=15" in found[odd]["torch"]["failure"]
    assert found[even]["torch"]["samples"]


def test_why_nothing_came_stands_at_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "torch_stack", lambda *_, **__: PeerRun([], "it broke"))
    case = Case("all_gather_matmul", "tiny", 16)
    found = time_peers([case], devices=2, layers=1, settings=Settings(), seconds_left=9)
    why = {"failure": "it broke"}
    assert found == {case: {"torch": why, "torch_async_tp": why}}
