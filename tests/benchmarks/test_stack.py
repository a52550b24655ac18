"""The stack benchmark on simulated devices: that all contenders compute what they should."""

from __future__ import annotations

import functools
import json

import jax
import pytest

from benchmarks import command_line, settings, stack
from benchmarks.peers import PeerRun
from tests.benchmarks.compiling import (
    COMPUTING,
    assert_close,
    assert_whole_and_silent,
    compiled,
)


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 4})


def building(direction, layers=2):
    case = stack.StackCase(stack.FeedForward("test", 16, 8, 64), direction, layers)
    return functools.partial(stack.build, case)


def reference(x, weights, cotangent):
    def forward(x, weights):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    # On one device, whole.
    x, weights, cotangent = jax.device_get((x, weights, cotangent))
    result, vjp = jax.vjp(forward, x, weights)
    return result, *vjp(cotangent)


@pytest.mark.parametrize("name", COMPUTING)
def test_every_contender_computes_the_stack_and_its_gradients(mesh, name):
    run, arguments = compiled(building("forward_backward"), mesh, name)
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), reference(*arguments))


@pytest.mark.parametrize(("direction", "dots"), [("forward", 2), ("forward_backward", 6)])
def test_ceiling_keeps_every_matmul_whole_and_communicates_nothing(mesh, direction, dots):
    layers = 3
    ceiling, arguments = compiled(building(direction, layers), mesh, "ceiling")
    baseline, _ = compiled(building(direction, layers), mesh, "baseline")
    assert_whole_and_silent(ceiling, baseline, dots * layers)
    # A GPU multiplies zeros faster: it draws less power for them.
    for leaf in jax.tree.leaves(jax.device_get(ceiling(*arguments))):
        assert 0.01 < leaf.std() < 100


def test_a_report_holds_every_contender_of_every_case(tmp_path, capsys):
    arguments = (
        "stack --platform cpu --devices 4 --shapes tiny --layers 1 --sweep-m 16 32 --groups 2"
        " --directions forward --contenders bulk ring auto ceiling --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["name"] for case in report["cases"]] == ["tiny M=16 forward", "tiny M=32 forward"]
    for case in report["cases"]:
        results = case["contenders"]
        assert list(results) == ["xla", "ring", "auto", "ceiling"]
        assert all(len(result["samples"]) == 2 for result in results.values())
        # Nothing runs under a matmul on the CPU, so auto decides for bulk.
        assert results["auto"]["same_program_as"] == "xla"
        assert results["auto"]["samples"] == results["xla"]["samples"]
    assert "tiny M=32 forward" in capsys.readouterr().out
    assert "| tiny M=32 forward |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "7B"], "shapes: '7B' is unknown; expected 70B, 8B, small, tiny"),
        (["--contenders", "rings"], "contenders: 'rings' is unknown; expected baseline"),
        (["--groups", "0"], "groups=0: expected at least 1"),
        (["--devices", "3"], "rows=64 of 'tiny forward': not divisible by 3 devices"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    tmp_path, capsys, arguments, sentence
):
    given = ["stack", "--platform", "cpu", "--shapes", "tiny", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        command_line.main([*given, *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compiling_alone_runs_nothing(tmp_path):
    arguments = (
        "stack --platform cpu --devices 4 --shapes tiny --layers 1 --directions forward"
        " --contenders bulk ring fused --compile-only --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    for result in case["contenders"].values():
        assert result["samples"] == [] and result["compile_seconds"] > 0
    report = (tmp_path / "report.md").read_text()
    assert "Seconds to trace, and to compile, one program after the other." in report
    assert "## Time" not in report
    _, stand_ins = report.split("## Carried out by another than the contender's name says\n\n")
    # An all-gather and a reduce-scatter, each on one line.
    assert [line.partition(": ")[0] for line in stand_ins.splitlines()] == [
        "- tiny forward, fused"
    ] * 2
    assert stand_ins.count("1 × bulk: fallback: fused is not possible: these kernels run") == 2


def test_peers_join_the_cases_that_were_measured(tmp_path, monkeypatch):
    asked = []

    def torch_stack(cases, **settings):
        asked.append(([case.name for case in cases], settings["devices"]))
        found = {"peer": "torch", "shape": "tiny M=16", "direction": "forward", "layers": 1}
        samples = [2e-3, 1e-3, 4e-3]
        return PeerRun([{**found, "samples": samples, "options": "eager", "tried": {}}], "stopped")

    monkeypatch.setattr(stack, "torch_stack", torch_stack)
    arguments = (
        "stack --platform cpu --devices 4 --shapes tiny --layers 1 --sweep-m 16 --groups 1 --peers"
        " --directions forward --contenders ceiling --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    assert asked == [(["tiny M=16 forward"], 4)]
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert list(case["contenders"]) == ["ceiling", "torch", "torch_async_tp"]
    assert case["contenders"]["torch"]["median"] == 2e-3
    assert case["contenders"]["torch"]["options"] == "eager"
    assert case["contenders"]["torch_async_tp"]["failure"] == "stopped"
    failures = (tmp_path / "report.md").read_text().partition("## Failures")[2]
    assert failures.strip() == "- tiny M=16 forward, torch_async_tp: stopped"


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="devices=9: there are 8; ask for fewer"):
        settings.make_mesh(settings.Settings(platform="cpu", devices=9))
