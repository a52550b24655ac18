"""On NVLink GPUs: numbers, repeatability, and copies between peers where a ring permutes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from collective_matmul import overlap_jit
from collective_matmul.implementations import IMPLEMENTATIONS
from tests import reference
from tests.reference import OPS, Case, Comparison, assert_close

pytestmark = pytest.mark.gpu

REPEATS = 20


@pytest.fixture(params=[2, 4])
def devices(request: pytest.FixtureRequest) -> int:
    return request.param


def large(op: str, implementation: str, devices: int) -> Case:
    columns = ((768,), (4, 128)) if op == "all_gather_matmul" else ((768,),)
    return Case(
        op=op,
        implementation=implementation,
        devices=devices,
        leading=(2, 1024),
        contracted=1024,
        columns=columns,
        dimension=1,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients_with_the_overlap_options(make_mesh, op, implementation, devices):
    case = large(op, implementation, devices)
    fun = case.sharded(make_mesh({reference.AXIS: devices}))

    @overlap_jit
    def results_and_gradients(x, ws, dys):
        ys, transpose = jax.vjp(fun, x, ws)
        return reference.Outcome(ys, *transpose(dys))

    x, ws, dys = arrays = case.arrays()
    first = results_and_gradients(x, tuple(ws), tuple(dys))
    expected = reference.reference(*arrays)
    assert_close(Comparison(first, expected, case.bounds(arrays), case.dtype))
    for _ in range(REPEATS):
        again = results_and_gradients(x, tuple(ws), tuple(dys))
        for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_ring_is_compiled_to_permutes_and_no_other_collective(make_mesh, op, devices):
    case = dataclasses.replace(large(op, "ring", devices), columns=((768,),))
    x, ws, _ = case.arrays()
    fun = overlap_jit(case.sharded(make_mesh({reference.AXIS: devices})))
    text = fun.lower(x, tuple(ws)).compile().as_text() or ""
    assert text.count(" collective-permute-start(") == devices - 1
    for collective in ("all-gather", "reduce-scatter", "all-reduce"):
        assert collective not in text
