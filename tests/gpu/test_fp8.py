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
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul.operands.format import FORMATS
from tests.conftest import skip_without
from tests.fp8_reference import SHIPPED_RECIPES, Fp8Case, quantized_outcomes
from tests.gpu.problems import described, mesh_of, size
from tests.gpu.test_repeats import IN_FLIGHT, REPEATS, still_same
from tests.reference import AXIS, OPS, PEER_KERNELS, Outcome

pytestmark = pytest.mark.gpu

GATHER, SCATTER, ALL_REDUCE = OPS
#: Runs with random delays, each on other operands.
DELAYED = 25
#: Tensor cores add products of 8 bits with 13 bits behind the point of the largest. Relative to the
#: sum of the magnitudes of a result's terms, errors of 6e-4 were seen; a missing chunk is half.
ACCUMULATION = 2.0**-10


@dataclass(frozen=True)
class Call:
    """Results and gradients of an op by a recipe and a backend: (x, ws, dys) -> `Outcome`."""

    case: Fp8Case

    def __str__(self) -> str:
        rows = "x".join(map(str, self.case.leading))
        return (
            f"{self.case.op}-{self.case.fp8}-{self.case.implementation}-{self.case.devices}-{rows}"
        )

    @property
    def devices(self) -> int:
        return self.case.devices

    @property
    def needs(self) -> tuple[Call]:
        """Programs that have to be compiled for it."""
        return (self,)

    def compile(self) -> Any:
        case, addresses_peers = self.case, self.case.implementation in PEER_KERNELS
        if addresses_peers and jax.default_backend() != "gpu":
            case = dataclasses.replace(case, implementation="xla")
        fun = case.sharded(self.mesh)

        def results_and_gradients(x: Any, ws: Any, dys: Any) -> Outcome:
            ys, transpose = jax.vjp(fun, x, ws)
            return Outcome(ys, *transpose(dys))

        arrays = jax.tree.map(jnp.asarray, self.case.arrays(0))
        shapes = jax.eval_shape(lambda *arrays: arrays, *map(_as_tuple, arrays))
        program = overlap_jit(results_and_gradients, peer_kernels=addresses_peers)
        return program.lower(*described(shapes, self.shardings)).compile()

    @property
    def mesh(self) -> Any:
        return mesh_of((AXIS,), (self.devices,))

    @property
    def shardings(self) -> Any:
        x, ws, ys = self.case.specs
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), (x, ws, ys))


def _as_tuple(arrays: Any) -> Any:
    return tuple(arrays) if isinstance(arrays, list) else arrays


def call(op: str, fp8: str, implementation: str, devices: int, rows: int = 1024) -> Call:
    """A call on whole tiles of our kernel, unless rows are others."""
    columns = ((size(2048),), (size(1024),)) if op == GATHER else ((size(1024),),)
    return Call(
        Fp8Case(
            op,
            implementation,
            devices,
            (size(rows),),
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
        for fp8 in SHIPPED_RECIPES
        for name in ("xla", "ring", "ring_two_way", "ring_direct", "fused")
    ),
    *(call(ALL_REDUCE, fp8, name, 2) for fp8 in SHIPPED_RECIPES for name in ("ring", "fused")),
    # Rows that are padded, and tiles with the rows of several devices or of none.
    *(
        call(op, fp8, "fused", 2, rows)
        for op in OPS
        for fp8 in SHIPPED_RECIPES
        for rows in (16, 2324)
    ),
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


@pytest.mark.needs("fused")
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", (GATHER, SCATTER))
@pytest.mark.parametrize("devices", (2, 4))
def test_random_delays_change_nothing(devices: int, op: str, fp8: str, _with_kernels: None) -> None:
    """A scale, or a product, that is read before it has arrived is another run's, or NaN."""
    from collective_matmul.ops.matmul.fused import all_gather, reduce_scatter

    skip_without(devices)
    case = call(op, fp8, "fused", devices).case
    recipe = FORMATS[fp8]

    def twice(x: jax.Array, ws: Any) -> jax.Array:
        rows, scaled = recipe.rows([x]), recipe.matrices(ws[:1])
        rows = [each.without_array for each in rows]

        def product(rows: Any, race_delays: bool) -> jax.Array:
            options: Any = {"dimension": 0, "race_delays": race_delays}
            if op == GATHER:
                return all_gather.all_gather_matmul(rows[0], scaled, AXIS, **options)[0][0]
            return reduce_scatter.matmul_reduce_scatter(rows, scaled, AXIS, **options)

        # The order of the launches is fixed, the delayed one first: what it reads too early is of
        # the program's last run, on other rows.
        delayed = product(rows, race_delays=True)
        rows, delayed = jax.lax.optimization_barrier((rows, delayed))
        return (delayed == product(rows, race_delays=False)).all()[None]

    x_spec, w_specs, _ = case.specs
    mesh = mesh_of((AXIS,), (devices,))
    sharded = jax.shard_map(twice, mesh=mesh, in_specs=(x_spec, w_specs), out_specs=P(AXIS))
    run = overlap_jit(sharded, peer_kernels=True)
    for seed in range(DELAYED):
        x, ws, _ = case.arrays(seed)
        assert np.asarray(run(x, tuple(ws))).all()


@functools.cache
def reference(case: Fp8Case) -> tuple[Outcome, Outcome]:
    """Results of a case, and the sums of its terms' magnitudes; equal for all backends."""
    return quantized_outcomes(case, case.arrays(0))


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
