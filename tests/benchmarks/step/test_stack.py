"""The stack benchmark on simulated devices: that all candidates compute the same."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import command_line
from benchmarks.comparison import communication
from benchmarks.measuring import settings
from benchmarks.pytorch import runner
from benchmarks.step import stack
from collective_matmul import overlap
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
    return stack.StackCase(stack.FeedForward("test", 16, 8, 64), direction, layers).build


def reference(x, weights, cotangent):
    def forward(x, weights):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    # On one device, whole.
    x, weights, cotangent = jax.device_get((x, weights, cotangent))
    result, vjp = jax.vjp(forward, x, weights)
    return result, *vjp(cotangent)


@pytest.mark.parametrize("name", [*COMPUTING, "explicit", "rewrite_jit"])
def test_every_candidate_computes_the_stack_and_its_gradients(mesh, name):
    run, arguments = compiled(building("forward_backward"), mesh, name)
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), reference(*arguments))


@pytest.mark.parametrize(
    "name",
    [
        *("ring_fp8_tensorwise", "auto_fp8_rowwise"),
        pytest.param("xla_fp8_blockwise", marks=pytest.mark.needs("blockwise")),
        *("rewrite_fp8_rowwise", "rewrite_jit_fp8_rowwise"),
    ],
)
def test_candidates_in_8_bits_compute_nearly_the_same(mesh, name):
    run, arguments = compiled(building("forward_backward"), mesh, name)
    results = jax.tree.leaves(jax.device_get(run(*arguments)))
    for actual, expected in zip(results, jax.tree.leaves(reference(*arguments)), strict=True):
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        # Numbers of 3 bits are off by 0.026, those of 2 by 0.05, in each of several products;
        # those of float32 by less than 0.001.
        assert 0.001 < error < 0.15


def test_a_program_over_explicit_axes_is_rewritten_to_that_of_the_ops(mesh, monkeypatch):
    with_rings = functools.partial(overlap, implementation="ring")
    monkeypatch.setattr(communication, "overlap", with_rings)
    found = []
    for name in ("ring", "rewrite_jit"):
        run, _ = compiled(building("forward_backward"), mesh, name)
        found.append(
            Counter(re.findall(r" (dot|copy|transpose|all-\w+|[\w-]+permute)\(", run.as_text()))
        )
    assert found[0] == found[1]
    assert found[0]["collective-permute"] and not found[0]["all-gather"]


def test_a_program_over_explicit_axes_whose_sites_are_not_replaced_is_refused(mesh):
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ValueError, match="require=4: only 0 "),
    ):
        compiled(building("forward_backward"), mesh, "rewrite_jit")


def test_the_bound_keeps_every_matmul_whole_and_communicates_nothing(mesh):
    layers = 3
    bound, arguments = compiled(building("forward_backward", layers), mesh, "compute_only")
    baseline, _ = compiled(building("forward_backward", layers), mesh, "baseline")
    assert_whole_and_silent(bound, baseline, 6 * layers)
    # A GPU multiplies zeros faster: it draws less power for them.
    for leaf in jax.tree.leaves(jax.device_get(bound(*arguments))):
        assert 0.01 < leaf.std() < 100


def test_a_report_holds_every_candidate_of_every_case(tmp_path, capsys):
    arguments = (
        "stack --platform cpu --devices 4 --shapes tiny --layers 1 --sweep-m 16 32 --groups 2"
        " --directions forward --candidates xla ring auto compute_only --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["name"] for case in report["cases"]] == ["tiny M=16 forward", "tiny M=32 forward"]
    for case in report["cases"]:
        results = case["candidates"]
        assert list(results) == ["xla", "ring", "auto", "compute_only"]
        assert all(len(result["samples"]) == 2 for result in results.values())
        # On the CPU nothing runs beside a matmul, so auto chooses xla.
        assert results["auto"]["same_program_as"] == "xla"
        assert results["auto"]["samples"] == results["xla"]["samples"]
    assert "tiny M=32 forward" in capsys.readouterr().out
    assert "| tiny M=32 forward |" in (tmp_path / "report.md").read_text()


def test_recipes_join_the_candidates_that_were_chosen_and_pytorchs(tmp_path, monkeypatch):
    asked = []

    def time_pytorch(cases, **settings):
        asked.extend(cases)
        found = {"name": "tiny forward", "candidate": "torch_async_tp_fp8_rowwise"}
        return [{**found, "samples": [8.0], "decisions": {"fused_matmul": 2}}], "-"

    monkeypatch.setattr(runner, "time_pytorch", time_pytorch)
    arguments = (
        "stack --platform cpu --devices 2 --shapes tiny --layers 1 --groups 1 --pytorch"
        " --directions forward --candidates baseline auto --no-try-options"
        " --fp8 rowwise blockwise --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    ours = ["baseline", "auto", "auto_fp8_rowwise", "auto_fp8_blockwise"]
    # torchao has no recipe with blocks.
    theirs = ["torch", "torch_async_tp", "torch_fp8_rowwise", "torch_async_tp_fp8_rowwise"]
    assert list(case["candidates"]) == [*ours, *theirs]
    assert asked[0]["candidates"] == theirs
    report = (tmp_path / "report.md").read_text()
    ratios = report.partition("## Over PyTorch")[2].partition("##")[0]
    assert ratios.count("| tiny forward | torch") == ratios.count("_tp_fp8_rowwise | base") == 1
    for name in ours:
        assert f"{name} {8.0 / case['candidates'][name]['median']:.2f}×" in ratios
    assert "- tiny forward, torch_async_tp_fp8_rowwise: 2 × fused_matmul" in report


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "7B"], "shapes: '7B' is unknown; expected 70B, 8B, small, tiny"),
        (["--candidates", "rings"], "candidates: 'rings' is unknown; expected baseline"),
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


def test_pytorch_joins_the_cases_that_were_measured(tmp_path, monkeypatch):
    asked = []

    def time_pytorch(cases, **settings):
        asked.append((cases, settings["devices"]))
        found = {"name": "tiny M=16 forward", "candidate": "torch", "options": "eager"}
        return [{**found, "samples": [2e-3, 1e-3, 4e-3], "tried": {}}], "stopped"

    monkeypatch.setattr(runner, "time_pytorch", time_pytorch)
    arguments = (
        "stack --platform cpu --devices 4 --shapes tiny --layers 1 --sweep-m 16 --groups 1"
        " --pytorch --directions forward --candidates compute_only --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    sizes = {"rows": 16, "features": 32, "hidden_features": 64, "layers": 1}
    assert asked == [([{"name": "tiny M=16 forward", "direction": "forward", **sizes}], 4)]
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert list(case["candidates"]) == ["compute_only", "torch", "torch_async_tp"]
    assert case["candidates"]["torch"]["median"] == 2e-3
    assert case["candidates"]["torch"]["options"] == "eager"
    assert case["candidates"]["torch_async_tp"]["failure"] == "stopped"
    failures = (tmp_path / "report.md").read_text().partition("## Failures")[2]
    assert failures.strip() == "- tiny M=16 forward, torch_async_tp: stopped"


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="devices=9: there are 8; ask for fewer"):
        settings.make_mesh(settings.Settings(platform="cpu", devices=9))
