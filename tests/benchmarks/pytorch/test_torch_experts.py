"""PyTorch's expert layers: what is asked for on the command line, and that they are right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.pytorch import EXPERT_NAMES
from benchmarks.pytorch.expert_layers import COMMAND
from benchmarks.pytorch.layer_lines import line_of

TINY = "tiny:9:64:32:4:2"


def test_a_layer_is_its_name_and_sizes() -> None:
    sizes = {"tokens": 9, "width": 64, "hidden": 32, "experts": 4, "choices": 2}
    assert COMMAND.layer_from(TINY) == {"name": "tiny", **sizes}


@pytest.mark.parametrize(
    ("layer", "reason"),
    {
        "tiny": "expected NAME:tokens:width:hidden:experts:choices",
        "tiny:9:64:0:4:2": "expected NAME",
        "tiny:9:64:32:4:-2": "expected NAME",
        "tiny:9:64:32:4:5": "more choices than experts",
        "tiny:9:60:32:4:2": "8 divides",
        "tiny:9:64:32:3:2": "--devices 2: does not divide the 3 experts",
    }.items(),
)
def test_layers_that_cannot_be_are_refused(
    layer: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        COMMAND.main(["--layers", layer])
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


def test_each_result_is_a_line() -> None:
    result = {"name": "tiny forward", "candidate": "torch_all_gather", "options": "eager"}
    assert line_of({**result, "failure": "no"}).endswith("failed: no")
    measured = {"samples": [1e-3, 2e-3, 4e-3], "peak_bytes": 2**31, "relative_error": 0.004}
    line = line_of({**result, **measured})
    assert line.endswith("2.000 ms [1.500, 3.000]    2.00 GiB  error 0.004")


def test_without_pytorch_the_reason_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    output = tmp_path / "results.json"
    assert COMMAND.main(["--layers", TINY, "--output", str(output)]) == 1
    reason = "tiny: PyTorch is not installed"
    assert capsys.readouterr().out == f"incomplete: {reason}\n"
    expected = {"results": [], "incomplete": [reason]}
    assert json.loads(output.read_text()) == expected


def test_all_ways_agree_with_the_float32_reference(tmp_path: Path) -> None:
    """No number of rows is a multiple of anything."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    output = tmp_path / "results.json"
    options = ["--platform", "cpu", "--groups", "2", "--group-seconds", "0.01"]
    assert COMMAND.main(["--layers", TINY, *options, "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert {result["candidate"] for result in results} == {*EXPERT_NAMES}
    assert len(results) == 10
    for result in results:
        assert len(result["samples"]) == 2
        assert 0 < result["relative_error"] < 0.02
