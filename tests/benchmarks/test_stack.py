"""The stack benchmark on simulated devices: that all contenders compute what they should."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from benchmarks import arrays, command_line, contenders, settings, stack
from benchmarks.measuring import trace
from benchmarks.programs import Operands

DEVICES = 4
# Sums over at most 64 numbers in another order, in float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": DEVICES})


def stack_case(direction, layers=2):
    return stack.StackCase(stack.FeedForward("test", 16, 8, 64), direction, layers)


def compiled(mesh, case, name):
    """A contender's executable for the case, and its arguments."""
    contender = contenders.make(name, mesh, try_options=False)
    program = stack.build(case, Operands(mesh, np.dtype("float32")), contender)
    options, jit = next(iter(contender.jits.items()))
    executable = trace(name, options, jit, program).lowered.compile()
    return executable, arrays.compile_maker([program.arguments])().fill(program.arguments)


def reference(x, weights, cotangent):
    def forward(x, weights):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    # On one device, whole.
    x, weights, cotangent = jax.device_get((x, weights, cotangent))
    result, vjp = jax.vjp(forward, x, weights)
    return result, *vjp(cotangent)


@pytest.mark.parametrize("name", [name for name in contenders.names() if name != "ceiling"])
def test_every_contender_computes_the_stack_and_its_gradients(mesh, name):
    run, arguments = compiled(mesh, stack_case("forward_backward"), name)
    jax.tree.map(
        lambda actual, expected: np.testing.assert_allclose(
            actual, expected, rtol=TOLERANCE, atol=TOLERANCE
        ),
        jax.device_get(run(*arguments)),
        reference(*arguments),
    )


@pytest.mark.parametrize(("direction", "dots"), [("forward", 2), ("forward_backward", 6)])
def test_ceiling_keeps_every_matmul_whole_and_communicates_nothing(mesh, direction, dots):
    layers = 3
    run, _ = compiled(mesh, stack_case(direction, layers), "ceiling")
    baseline, _ = compiled(mesh, stack_case(direction, layers), "baseline")
    text = run.as_text()
    assert not any(word in text for word in ("all-gather", "reduce-scatter", "all-reduce"))
    assert text.count(" dot(") == dots * layers == baseline.as_text().count(" dot(")
    flops = [program.cost_analysis()["flops"] for program in (run, baseline)]
    # Within what adding up the partial sums of a reduce-scatter takes.
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


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
        assert list(results) == ["bulk", "ring", "auto", "ceiling"]
        assert all(len(result["samples"]) == 2 for result in results.values())
        # Nothing runs under a matmul on the CPU, so auto decides for bulk.
        assert results["auto"]["same_program_as"] == "bulk"
        assert results["auto"]["samples"] == results["bulk"]["samples"]
    assert "tiny M=32 forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "7B"], "shapes: '7B' is unknown; expected 70B, 8B, small, tiny"),
        (["--contenders", "rings"], "contenders: 'rings' is unknown; expected baseline"),
        (["--groups", "0"], "groups=0: expected at least 1"),
        (["--devices", "3"], "rows=64 of shape 'tiny': not divisible by 3 devices"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    tmp_path, capsys, arguments, sentence
):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(
            [
                "stack",
                "--platform",
                "cpu",
                "--shapes",
                "tiny",
                "--output",
                str(tmp_path),
                *arguments,
            ]
        )
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="devices=9: there are 8; ask for fewer"):
        settings.make_mesh(settings.Settings(platform="cpu", devices=9))
