"""Pictures of reports."""

from __future__ import annotations

import json

import pytest

from benchmarks import command_line

DEVICES = ["NVIDIA H200"] * 4


def stack_report(devices):
    def case(shape, direction, **seconds):
        results = {name: {"median": median, "decisions": {}} for name, median in seconds.items()}
        return {
            "name": f"{shape} {direction}",
            "direction": direction,
            "devices": devices,
            "candidates": {**results, "windowed": {"failure": "refused"}},
        }

    cases = [
        case(shape, direction, baseline=1.2, ring=1.1, auto=1.05, compute_only=1.0, torch=1.3)
        for shape in ("70B", "8B")
        for direction in ("forward", "forward_backward")
    ]
    return {"benchmark": "stack", "environment": {"devices": DEVICES}, "cases": cases}


def ops_report():
    cases = [
        {
            "name": f"{rows}",
            "rows": rows,
            "direction": "forward",
            "devices": 4,
            "candidates": {name: {"median": 1.0} for name in ("xla", "auto")},
        }
        for rows in (512, 8192)
    ]
    return {"benchmark": "ops", "environment": {"devices": DEVICES}, "cases": cases}


@pytest.fixture
def write(tmp_path):
    def write(*reports):
        paths = [tmp_path / f"report{i}.json" for i in range(len(reports))]
        for path, report in zip(paths, reports, strict=True):
            path.write_text(json.dumps(report))
        return [str(path) for path in paths]

    return write


def test_reports_of_two_and_four_devices_are_one_picture(write, tmp_path):
    pytest.importorskip("matplotlib")
    paths = write(stack_report(2), stack_report(4))
    command_line.main(["picture", *paths, "--output", str(tmp_path / "picture.svg")])
    picture = (tmp_path / "picture.svg").read_text()
    assert "<!-- 2 × NVIDIA H200, forward -->" in picture
    assert "<!-- 4 × NVIDIA H200, forward and backward -->" in picture
    assert "<!-- compute-only bound -->" in picture
    assert "<!-- torch -->" in picture


def test_ops_are_drawn_by_rows(write, tmp_path):
    pytest.importorskip("matplotlib")
    command_line.main(["picture", *write(ops_report())])
    assert (tmp_path / "report0.png").stat().st_size > 0


def test_reports_of_different_benchmarks_are_refused(write, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["picture", *write(stack_report(4), ops_report())])
    assert stopped.value.code == 2
    assert "expected one or more of one benchmark" in capsys.readouterr().err


def test_another_file_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit):
        command_line.main(["picture", str(tmp_path / "other.json")])
    assert "other.json' is not a benchmark's report.json" in capsys.readouterr().err
