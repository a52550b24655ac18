"""Operands in 8 bits on GPUs: results and gradients, and the same bits every time."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from collective_matmul import overlap_jit
from collective_matmul.fp8 import RECIPES
from tests.fp8_reference import Fp8Case, quantized_outcome
from tests.gpu.problems import described, mesh_of, size
from tests.gpu.test_repeats import IN_FLIGHT, REPEATS, still_same
from tests.reference import AXIS, OPS, Outcome

pytestmark = pytest.mark.gpu

GATHER, SCATTER, ALL_REDUCE = OPS
#: Tensor cores add products of 8 bits with 13 bits behind the point of the largest. Relative to the
#: sum of the magnitudes of a result's terms, errors of 6e-4 were seen; a missing chunk is half.
ACCUMULATION = 2.0**-10


@dataclass(frozen=True)
class Call:
    """Results and gradients of an op by a recipe and a backend: (x, ws, dys) -> `Outcome`."""

    case: Fp8Case

    def __str__(self) -> str:
        return f"{self.case.op}-{self.case.fp8}-{self.case.implementation}-{self.case.devices}"

    @property
    def devices(self) -> int:
        return self.case.devices

    @property
    def needs(self) -> tuple[Call]:
        """What has to be compiled for it."""
        return (self,)

    def compile(self) -> Any:
        fun = self.case.sharded(self.mesh)

        def results_and_gradients(x: Any, ws: Any, dys: Any) -> Outcome:
            ys, transpose = jax.vjp(fun, x, ws)
            return Outcome(ys, *transpose(dys))

        arrays = jax.tree.map(jnp.asarray, self.case.arrays(0))
        shapes = jax.eval_shape(lambda *arrays: arrays, *map(_as_tuple, arrays))
        return (
            overlap_jit(results_and_gradients).lower(*described(shapes, self.shardings)).compile()
        )

    @property
    def mesh(self) -> Any:
        return mesh_of((AXIS,), (self.devices,))

    @property
    def shardings(self) -> Any:
        x, ws, ys = self.case.specs
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), (x, ws, ys))


def _as_tuple(arrays: Any) -> Any:
    return tuple(arrays) if isinstance(arrays, list) else arrays


def call(op: str, fp8: str, implementation: str, devices: int) -> Call:
    """A call on whole tiles of our kernel."""
    columns = ((size(2048),), (size(1024),)) if op == GATHER else ((size(1024),),)
    return Call(
        Fp8Case(
            op,
            implementation,
            devices,
            (size(1024),),
            size(2048),
            columns,
            dimension=0,
            dtype="bfloat16",
            fp8=fp8,
        )
    )


CALLS = [
    *(
        call(op, fp8, name, devices)
        for devices in (2, 4)
        for op in (GATHER, SCATTER)
        for fp8 in RECIPES
        for name in ("xla", "ring", "ring_two_way", "ring_direct")
    ),
    *(call(ALL_REDUCE, fp8, "ring", 2) for fp8 in RECIPES),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_repeats(programs: Any, call: Call) -> None:
    program = programs(call)
    placed = jax.device_put(tuple(map(_as_tuple, call.case.arrays(0))), call.shardings)
    first = program(*placed)
    assert_close(call, first)
    same = jnp.array(True)
    for i in range(REPEATS):
        same = still_same(same, first, program(*placed))
        if i % IN_FLIGHT == 0:
            same.block_until_ready()
    assert same


@functools.cache
def reference(case: Fp8Case) -> tuple[Outcome, Outcome]:
    """What a case computes, and the sums of its terms' magnitudes; for all backends the same."""
    arrays = case.arrays(0)
    return quantized_outcome(case, arrays), quantized_outcome(case, arrays, magnitudes=True)


def assert_close(call: Call, actual: Outcome) -> None:
    """All numbers are those of the quantized operands, to accumulation and rounding errors."""
    expected, magnitudes = reference(dataclasses.replace(call.case, implementation="xla"))
    roundings = (call.devices + 2) * float(jnp.finfo(jnp.bfloat16).eps) / 2

    def assert_one(actual: Any, expected: np.ndarray, magnitude: np.ndarray) -> None:
        error = abs(np.asarray(actual, np.float64) - expected)
        allowed = ACCUMULATION * magnitude + roundings * abs(expected).max()
        worst = np.max(error / allowed)
        assert worst <= 1, f"error in units of what is allowed: {worst}"

    jax.tree.map(assert_one, actual, expected, magnitudes)
