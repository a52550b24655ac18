"""The benchmark of sharded weights on simulated devices: that all candidates compute the same."""

from __future__ import annotations

import json

import jax
import pytest
from tests.benchmarks.comparison.compiling import assert_close, compiled

from benchmarks import command_line, sharded_stack


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 4})


def reference(x, weights, cotangent):
    def forward(x, weights):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    result, vjp = jax.vjp(forward, *jax.device_get((x, weights)))
    return result, *vjp(jax.device_get(cotangent))


@pytest.mark.parametrize("name", sharded_stack.CANDIDATES)
def test_every_candidate_computes_the_stack_and_its_gradients(mesh, name):
    case = sharded_stack.ShardedStackCase("tiny", 8, "forward_backward", 2)
    run, arguments = compiled(case.build, mesh, name)
    actual, expected = jax.device_get(run(*arguments)), reference(*arguments)
    if name == "compute_only":  # Devices have gradients of their own rows.
        *rest, gradients = actual
        total = jax.tree.map(lambda dw: dw.reshape(4, -1, dw.shape[-1]).sum(0), gradients)
        actual = (*rest, total)
    jax.tree.map(assert_close, actual, expected)


def test_a_report(tmp_path):
    arguments = (
        "sharded_stack --platform cpu --devices 2 --shapes tiny --layers 1 --rows 16 --groups 2"
        " --directions forward --candidates xla compute_only --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["name"] for case in report["cases"]] == ["tiny 16 rows per device forward"]
