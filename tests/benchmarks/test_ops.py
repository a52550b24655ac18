"""The benchmark of single ops on simulated devices."""

from __future__ import annotations

import functools
import json

import jax
import pytest

from benchmarks import command_line, ops
from tests.benchmarks.compiling import (
    COMPUTING,
    assert_close,
    assert_whole_and_silent,
    compiled,
)

REPETITIONS = 2
PROJECTIONS = {
    "gather": ops.Projection("test", "all_gather", 16, (8, 24)),
    "scatter": ops.Projection("test", "reduce_scatter", 16, (8,)),
}


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 4})


def building(kind, direction):
    case = ops.OpCase(PROJECTIONS[kind], 8, direction, REPETITIONS)
    return functools.partial(ops.build, case)


def reference(kind, xs, weights, cotangents):
    def forward(xs, weights):
        results = [tuple(x @ w for w in ws) for x, ws in zip(xs, weights, strict=True)]
        return results if kind == "gather" else [result for (result,) in results]

    xs, weights, cotangents = jax.device_get((xs, weights, cotangents))
    result, vjp = jax.vjp(forward, xs, weights)
    return result, *vjp(cotangents)


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("name", COMPUTING)
def test_every_contender_computes_the_op_and_its_gradients(mesh, name, kind):
    run, arguments = compiled(building(kind, "forward_backward"), mesh, name)
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), reference(kind, *arguments))


@pytest.mark.parametrize(("kind", "weights"), [("gather", 2), ("scatter", 1)])
@pytest.mark.parametrize(("direction", "dots"), [("forward", 1), ("forward_backward", 3)])
def test_ceiling_keeps_every_matmul_whole_and_communicates_nothing(
    mesh, kind, weights, direction, dots
):
    ceiling, _ = compiled(building(kind, direction), mesh, "ceiling")
    baseline, _ = compiled(building(kind, direction), mesh, "baseline")
    assert_whole_and_silent(ceiling, baseline, dots * weights * REPETITIONS)


def test_the_sweep_is_wide_and_any_beginning_of_it_is_mixed():
    sweep = ops.Ops(cases=0).chosen_cases()
    assert len(set(sweep)) == len(sweep) > 200
    chosen = ops.Ops().chosen_cases()
    assert len(chosen) == ops.Ops().cases
    assert {case.projection.op for case in chosen[:20]} == {"all_gather", "reduce_scatter"}
    assert {case.direction for case in chosen[:20]} == {"forward", "forward_backward"}
    assert {case.rows for case in chosen} >= set(ops.Ops().rows)


def test_few_rows_are_repeated_more_often():
    repetitions = {case.rows: case.repetitions for case in ops.Ops(cases=0).chosen_cases()}
    expected = {512: 16, 1024: 16, 2048: 16, 3072: 10, 4096: 8, 8192: 4, 16384: 2, 32768: 2}
    assert repetitions == expected


def test_a_sweep_can_be_of_some_projections():
    sweep = ops.Ops(cases=0, projections=("up", "down"), models=("8B",)).chosen_cases()
    assert {case.projection.name for case in sweep} == {"8B up", "8B down"}


def test_what_a_contender_cannot_do_is_said_and_costs_the_others_nothing(tmp_path):
    arguments = (
        "ops --platform cpu --devices 4 --dtype float32 --models debug --rows 16 --awkward-rows"
        " --directions forward --cases 1 --groups 1 --contenders bulk mosaic_example --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert case["contenders"]["xla"]["failure"] is None
    assert case["contenders"]["xla"]["median"] > 0
    assert "JAX's Mosaic example: " in case["contenders"]["mosaic_example"]["failure"]
    assert "mosaic_example: " in (tmp_path / "report.md").read_text()


def test_a_report_compares_auto_with_bulk(tmp_path):
    arguments = (
        "ops --platform cpu --devices 4 --dtype float32 --models debug --rows 16 --awkward-rows"
        " --directions forward --cases 2 --groups 2 --repetitions 1 --noise-checks 1"
        " --contenders bulk auto auto_fused ceiling --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    cases = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert [list(case["contenders"]) for case in cases] == [
        ["xla", "auto", "auto_fused", "ceiling", "bulk again"],
        ["xla", "auto", "auto_fused", "ceiling"],
    ]
    again = cases[0]["contenders"]["bulk again"]
    assert again["samples"] != cases[0]["contenders"]["xla"]["samples"]
    table = (tmp_path / "report.md").read_text()
    # M, cases, not bulk, wins, losses, least, mean, most: the same program, so the ratio is 1.
    assert "| all | 2 | 0 | 0 | 0 | 1.000 | 1.000 | 1.000 |" in table
    # Where fused kernels may be chosen, a program of other options.
    assert table.count("| all | 2 | 0 |") == 2
