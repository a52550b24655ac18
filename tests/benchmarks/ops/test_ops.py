"""The benchmark of single ops on simulated devices."""

from __future__ import annotations

import functools
import json

import jax
import pytest

from benchmarks import command_line
from benchmarks.internals import Layer
from benchmarks.ops import ops
from tests.benchmarks.compiling import (
    COMPUTING,
    assert_close,
    assert_whole_and_silent,
    compiled,
)

REPETITIONS = 2
LAYERS = {
    "all_gather_matmul": Layer("test", "gather", 16, (8, 24)),
    "matmul_reduce_scatter": Layer("test", "scatter", 16, (8,)),
    # Wide enough for the sums between devices to be few beside the products.
    "matmul_all_reduce": Layer("test", "scatter", 64, (8,)),
}
WITH_GRADIENTS = ("all_gather_matmul", "matmul_reduce_scatter")


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 4})


def building(op, direction):
    case = ops.OpCase("test", LAYERS[op], op, 8, direction, REPETITIONS)
    return case.build


def forward(op, xs, weights):
    results = [tuple(x @ w for w in ws) for x, ws in zip(xs, weights, strict=True)]
    return results if op == "all_gather_matmul" else [result for (result,) in results]


@pytest.mark.parametrize("op", WITH_GRADIENTS)
@pytest.mark.parametrize("name", COMPUTING)
def test_every_candidate_computes_the_op_and_its_gradients(mesh, name, op):
    run, arguments = compiled(building(op, "forward_backward"), mesh, name)
    xs, weights, cotangents = jax.device_get(arguments)
    result, vjp = jax.vjp(functools.partial(forward, op), xs, weights)
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), (result, *vjp(cotangents)))


@pytest.mark.parametrize("name", [*COMPUTING, "explicit"])
def test_every_candidate_computes_an_all_reduce(mesh, name):
    run, arguments = compiled(building("matmul_all_reduce", "forward"), mesh, name)
    expected = forward("matmul_all_reduce", *jax.device_get(arguments))
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), expected)


@pytest.mark.parametrize(
    ("op", "direction", "dots"),
    [
        ("all_gather_matmul", "forward_backward", 3 * 2),
        ("matmul_reduce_scatter", "forward_backward", 3),
        ("matmul_all_reduce", "forward", 1),
    ],
)
def test_the_bound_keeps_every_matmul_whole_and_communicates_nothing(mesh, op, direction, dots):
    bound, _ = compiled(building(op, direction), mesh, "compute_only")
    baseline, _ = compiled(building(op, direction), mesh, "baseline")
    assert_whole_and_silent(bound, baseline, dots * REPETITIONS)


def test_the_sweep_is_wide_and_any_beginning_of_it_is_mixed():
    sweep = ops.Ops(cases=0).chosen_cases()
    assert len(set(sweep)) == len(sweep) > 200
    chosen = ops.Ops().chosen_cases()
    assert len(chosen) == ops.Ops().cases
    assert {case.op for case in chosen[:20]} == set(WITH_GRADIENTS)
    assert {case.direction for case in chosen[:20]} == {"forward", "forward_backward"}
    assert {case.rows for case in chosen} >= set(ops.Ops().rows)


def test_few_rows_are_repeated_more_often():
    repetitions = {case.rows: case.repetitions for case in ops.Ops(cases=0).chosen_cases()}
    assert repetitions == {512: 16, 1024: 16, 2048: 16, 4096: 8, 8192: 4, 16384: 2, 32768: 2}


def test_a_sweep_can_be_of_some_layers_and_ops():
    sweep = ops.Ops(
        cases=0, layers=("up", "down"), models=("llama3-8b",), ops=("matmul_all_reduce",)
    )
    assert {(c.layer.name, c.op, c.direction) for c in sweep.chosen_cases()} == {
        ("down", "matmul_all_reduce", "forward")
    }


def test_a_report_compares_auto_with_xla_and_tells_failures(tmp_path):
    arguments = (
        "ops --platform cpu --devices 4 --dtype float32 --models tiny --rows 16"
        " --directions forward --groups 2 --repetitions 1 --noise-checks 1"
        " --candidates xla auto auto_fused mosaic_example compute_only --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    cases = json.loads((tmp_path / "report.json").read_text())["cases"]
    names = ["mosaic_example", "xla", "auto", "auto_fused", "compute_only"]
    assert [list(case["candidates"]) for case in cases] == [[*names, "xla again"], names]
    xla, again = (cases[0]["candidates"][name] for name in ("xla", "xla again"))
    assert again["samples"] != xla["samples"] and again["failure"] is xla["failure"] is None
    assert "Mosaic" in cases[0]["candidates"]["mosaic_example"]["failure"]
    report = (tmp_path / "report.md").read_text()
    assert "mosaic_example: " in report and "## Noise" in report
    # M, cases, not xla, wins, losses, least, mean, most: the same program, so the ratio is 1.
    assert "| all | 2 | 0 | 0 | 0 | 1.000 | 1.000 | 1.000 |" in report
    # Where fused kernels may be chosen, a program with other options.
    assert report.count("| all | 2 | 0 |") == 2


def test_pytorch_gets_forward_cases_of_one_weight():
    gather, scatter = (LAYERS[op] for op in WITH_GRADIENTS)
    assert ops.OpCase("", gather, "all_gather_matmul", 8, "forward", 3).for_pytorch() is None
    backward = ops.OpCase("", scatter, "matmul_reduce_scatter", 8, "forward_backward", 3)
    assert backward.for_pytorch() is None
    sizes = {"rows": 8, "layers": 3}
    up = Layer("up", "gather", 16, (32,))
    described = ops.OpCase("", up, "all_gather_matmul", 8, "forward", 3).for_pytorch()
    wide = {"features": 16, "hidden_features": 32}
    assert described == {"op": "all_gather_matmul", **sizes, **wide}
    described = ops.OpCase("", scatter, "matmul_all_reduce", 8, "forward", 3).for_pytorch()
    assert described == {"op": "matmul_all_reduce", **sizes, "features": 8, "hidden_features": 16}
