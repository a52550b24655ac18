"""The benchmark of processes: both candidates compute the same, in one process and in two."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.processes.processes import Processes, rows, run


@pytest.mark.exhaustive
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    settings = Processes(
        platform="cpu", devices=2, batches=(2,), layers=2, calls=1, groups=1, output=tmp_path
    )
    cases = run(settings).content["cases"]
    assert [case["processes"] for case in cases] == [1, 2]
    assert "| 2 | 2 |" in (tmp_path / "report.md").read_text()
    assert all(case["error"] == 0 and case["taken"] == ["xla"] for case in cases)


def test_rows() -> None:
    times = {"plain": [3e-5, 5e-5, 4e-5], "auto": [2e-5] * 3}
    case = {"processes": 2, "batch": 8, "times": times, "taken": ["one_shot"], "error": 0.001}
    assert rows({"cases": [case]}).splitlines()[-1] == (
        "| 2 | 8 | 40.0 | 20.0 | 2.00 | one_shot | 1.0e-03 |"
    )


def test_more_devices_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^devices=1000: there are \d+; ask for fewer$"):
        run(Processes(devices=1000, output=tmp_path))
