"""XLA's own programs are tried with sets of XLA options."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import command_line
from benchmarks.comparison import candidates, timing
from benchmarks.comparison.baseline_xla_options import BASELINE, DEFAULT, WINDOWED_EINSUM, known
from benchmarks.comparison.compiling import Compiled, compile_cases
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.timing import Timed, measure_case
from benchmarks.internals import Timing
from benchmarks.step import stack

UNKNOWN = {"of the future": {"xla_gpu_overlap_everything": "1"}}


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 2})


def compiled(mesh, *chosen: candidates.Candidate) -> Compiled:
    case = stack.StackCase(stack.FeedForward("test", 8, 4, 8), "forward", 1)
    operands = Operands(mesh, np.dtype("float32"))
    (ready,) = compile_cases(chosen, [lambda candidate: case.build(operands, candidate)], 2)
    return ready


def test_options_that_xla_refuses_are_left_out_with_a_note(capsys):
    assert known({**DEFAULT, **UNKNOWN}) == DEFAULT
    printed = capsys.readouterr().out
    assert "XLA options 'of the future' are left out: " in printed
    assert "xla_gpu_overlap_everything" in printed
    # Sets that are not tried are not mentioned.
    assert known({**DEFAULT, **UNKNOWN}, 1) == DEFAULT
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sets"),
    [("baseline", BASELINE), ("explicit", BASELINE), ("windowed_einsum", WINDOWED_EINSUM)],
)
def test_xlas_own_programs_are_tried_with_every_set(mesh, name, sets):
    tried = candidates.make(name, mesh).option_sets
    assert list(tried.items()) == [item for item in sets.items() if item[0] in tried]
    assert len(tried) > 1
    first, *_ = sets.items()
    assert candidates.make(name, mesh, try_options=False).option_sets == dict([first])


@pytest.mark.parametrize("name", ["xla", "ring", "auto", "rewrite", "rewrite_jit", "compute_only"])
def test_other_programs_are_compiled_once(mesh, name):
    assert candidates.make(name, mesh).option_sets == DEFAULT


def test_the_fastest_options_count(mesh, monkeypatch):
    seconds = {"default": 3.0, "latency hiding on": 2.0, "no dot merger": 5.0}
    monkeypatch.setattr(candidates, "BASELINE", {name: BASELINE[name] for name in seconds})
    measured = []

    def measure(runs, groups, seconds_per_group=0.0):
        measured.append(runs)
        return {name: Timing((seconds.get(name, 1.0),) * groups) for name in runs}

    monkeypatch.setattr(timing, "measure", measure)
    chosen = [candidates.make(name, mesh) for name in ("baseline", "compute_only")]
    results, _ = measure_case(compiled(mesh, *chosen), Timed(groups=2, seconds=1.0))
    tried, timed = measured
    assert set(tried) == set(seconds)
    assert list(timed) == ["baseline", "compute_only"]
    assert timed["baseline"] is tried["latency hiding on"]
    assert results["baseline"].options == "latency hiding on"
    assert results["baseline"].tried == seconds
    assert results["baseline"].samples == (1.0, 1.0)
    assert results["compute_only"].options == "default"
    assert not results["compute_only"].tried


def test_a_set_that_fails_leaves_the_others(mesh):
    sets = {**UNKNOWN, **DEFAULT}
    candidate = dataclasses.replace(candidates.make("baseline", mesh), option_sets=sets)
    results, _ = measure_case(compiled(mesh, candidate), Timed(groups=1, seconds=1e-6))
    assert results["baseline"].failure is None
    assert results["baseline"].options == "default"


def test_without_a_set_there_is_a_failure(mesh):
    candidate = dataclasses.replace(candidates.make("windowed_einsum", mesh), option_sets={})
    results, _ = measure_case(compiled(mesh, candidate), Timed(groups=1, seconds=1e-6))
    assert results["windowed_einsum"].failure == "XLA refuses its options"


def test_a_report_tells_which_options_were_tried(tmp_path, monkeypatch):
    few = ("default", "no dot merger")
    monkeypatch.setattr(candidates, "BASELINE", {name: BASELINE[name] for name in few})
    arguments = (
        "stack --platform cpu --devices 2 --shapes tiny --layers 1 --groups 1 --directions forward"
        " --group-seconds 0.001 --candidates baseline windowed_einsum --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    for name, sets in (("baseline", BASELINE), ("windowed_einsum", WINDOWED_EINSUM)):
        result = case["candidates"][name]
        assert set(result["tried"]) <= set(sets)
        assert result["options"] == min(result["tried"], key=result["tried"].__getitem__)
    report = (tmp_path / "report.md").read_text()
    assert report.partition("## Options tried")[2].count("tiny forward, ") == 2
