"""The fused kernels on GPUs, beside what the tests of all implementations find.

Operands are sparse whole numbers, so that all sums are exact: results are a float64 matmul's, bit
for bit. A row that is late, or a sum that misses or repeats a term, is wrong by at least one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    overlap_jit,
)
from collective_matmul.ops.matmul.fused import all_gather, reduce_scatter
from tests.conftest import skip_without
from tests.gpu.problems import mesh_of, or_xla

pytestmark = pytest.mark.gpu

AXIS, OTHER = "tensor", "data"
REPEATS = 25


@dataclass(frozen=True)
class Case:
    """An op on global arrays: x [M, K] and w [K, N].

    Attributes:
      op: "gather", "scatter" or "reduce".
      sizes: M, K and N.
      mesh: sizes of its axes, of which one is communicated over; every other splits the batch.
    """

    op: str
    sizes: tuple[int, int, int]
    mesh: tuple[tuple[str, int], ...] = ((AXIS, 4),)
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        return "-".join([self.op, sizes, *(f"{n}{name}" for name, n in self.mesh), self.dtype])

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def batch(self) -> int:
        return dict(self.mesh).get(OTHER, 1)

    @property
    def specs(self) -> tuple[P, P, P]:
        """Specs for x [batch, M, K], w and the result [batch, M, N]."""
        if self.op == "gather":
            return P(OTHER, AXIS), P(None, AXIS), P(OTHER, None, AXIS)
        y = P(OTHER, AXIS) if self.op == "scatter" else P(OTHER)
        return P(OTHER, None, AXIS), P(AXIS), y

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, w, and a cotangent of the result."""
        rows, contracted, columns = self.sizes
        draw = np.random.default_rng(seed)
        # Sums then are rarely beyond 100, and bfloat16 has all whole numbers to 256.
        density = min(0.5, 20 / max(self.sizes) ** 0.5)

        def whole_numbers(*shape: int) -> np.ndarray:
            some = draw.random(shape, np.float32) < density
            return (draw.choice([-1.0, 1.0], shape) * some).astype(jnp.dtype(self.dtype))

        return (
            whole_numbers(self.batch, rows, contracted),
            whole_numbers(contracted, columns),
            whole_numbers(self.batch, rows, columns),
        )

    def compile(self, way: Callable[..., Any], *, results: int = 1) -> Callable[..., Any]:
        """A program of global arrays, from a function of local x [1, ...] and w."""
        sharded, shardings = self.sharded(way, results=results)
        return overlap_jit(sharded, peer_kernels=True, in_shardings=shardings)

    def sharded(self, way: Callable[..., Any], *, results: int = 1) -> tuple[Any, Any]:
        """A program of global arrays, not yet compiled, and how its arguments are laid out."""
        mesh = mesh_of(tuple(name for name, _ in self.mesh), tuple(n for _, n in self.mesh))
        specs = self.specs
        if self.batch == 1:
            specs = tuple(
                P(None, *spec[1:]) if spec and spec[0] == OTHER else spec for spec in specs
            )
        x_spec, w_spec, y_spec = specs
        sharded = jax.shard_map(
            way, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=(y_spec,) * results
        )
        return sharded, [NamedSharding(mesh, spec) for spec in (x_spec, w_spec)]


def op_of(case: Case) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The op by name, on local x [1, M, K] and w; on simulated devices XLA executes it."""
    keywords: dict[str, Any] = {"implementation": or_xla("fused")}
    if case.op == "gather":
        return lambda x, w: all_gather_matmul(x, w, AXIS, gather_dimension=1, **keywords)
    if case.op == "scatter":
        return lambda x, w: matmul_reduce_scatter(x, w, AXIS, scatter_dimension=1, **keywords)
    return lambda x, w: matmul_all_reduce(x, w, AXIS, **keywords)


def kernel_of(case: Case, **options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The kernel itself, which raises where it cannot run."""
    if case.op == "gather":
        return lambda x, w: all_gather.all_gather_matmul(x, [w], AXIS, dimension=1, **options)[0][0]
    if case.op == "scatter":
        return lambda x, w: reduce_scatter.matmul_reduce_scatter(
            [x], [w], AXIS, dimension=1, **options
        )
    return lambda x, w: reduce_scatter.matmul_all_reduce(x, w, AXIS, **options)


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ w.astype(np.float64)


OPS = ("gather", "scatter", "reduce")
SIZES = {
    "decode": (16, 512, 256),
    "a row for each device": (4, 256, 128),
    "64 rows for each": (256, 512, 512),
    "24 rows": (24, 1792, 8192),
    "48 rows": (48, 1792, 8192),
    "96 rows": (96, 1792, 8192),
    "ragged": (400, 640, 384),
    "several waves": (4096, 1024, 2048),
}
TWO_AXES = (((OTHER, 2), (AXIS, 2)), ((AXIS, 2), (OTHER, 2)), ((AXIS, 2),))

ALONE = ((AXIS, 4),), ((AXIS, 2),)
EVERY = [Case(op, sizes, mesh) for mesh in ALONE for op in OPS for sizes in SIZES.values()]
# Sums of 32 columns more than whole swizzles.
NARROW = [Case(op, (64, 512, 160), mesh) for mesh in ALONE for op in OPS[1:]]
SOME = [Case(op, SIZES[name]) for op in OPS for name in ("decode", "several waves")]
ON_TWO = [Case(op, (512, 512, 512), mesh, "float16") for op in OPS for mesh in TWO_AXES]


@pytest.mark.parametrize("case", [*EVERY, *NARROW, *ON_TWO], ids=str)
def test_values(case: Case, _with_kernels: None) -> None:
    skip_without(case.devices)
    x, w, _ = case.arrays()
    run = case.compile(lambda x, w: (kernel_of(case)(x, w),))
    np.testing.assert_array_equal(np.asarray(run(x, w)[0], np.float64), product(x, w))


@pytest.mark.parametrize("case", [*SOME, *ON_TWO], ids=str)
def test_gradients(case: Case) -> None:
    skip_without(case.devices)
    x, w, dy = case.arrays()
    op, shardings = case.sharded(lambda x, w: (op_of(case)(x, w),))

    @functools.partial(overlap_jit, peer_kernels=True)
    def gradients(x, w, dy):
        x, w = lax.with_sharding_constraint((x, w), tuple(shardings))
        return jax.vjp(lambda x, w: op(x, w)[0], x, w)[1](dy)

    dx, dw = gradients(x, w, dy)
    np.testing.assert_array_equal(np.asarray(dx, np.float64), product(dy, w.T))
    expected = sum(product(a.T, b) for a, b in zip(x, dy, strict=True))
    np.testing.assert_array_equal(np.asarray(dw, np.float64), expected)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_random_delays_change_nothing(case: Case, _with_kernels: None) -> None:
    skip_without(case.devices)
    run = case.compile(lambda x, w: (kernel_of(case, race_delays=True)(x, w),))
    for seed in range(REPEATS):
        x, w, _ = case.arrays(seed)
        np.testing.assert_array_equal(np.asarray(run(x, w)[0], np.float64), product(x, w))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_twice_in_a_loop(case: Case, _with_kernels: None) -> None:
    """The kernel runs twice in each turn, on operands that differ, with no host between."""
    skip_without(case.devices)
    kernel = kernel_of(case)

    def loop(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(carry, _):
            x, w = carry
            ys = kernel(x, w), kernel(-x, w)
            return (-x, w), ys

        _, ys = lax.scan(turn, (x, w), length=REPEATS)
        signs = jnp.where(jnp.arange(REPEATS) % 2, -1, 1).astype(x.dtype)
        first, second = (signs.reshape(-1, 1, 1, 1) * y for y in ys)
        # The same on every turn, or NaN.
        same = [jnp.where((y == y[:1]).all(), y[0], jnp.nan) for y in (first, -second)]
        return same[0], same[1]

    x, w, _ = case.arrays()
    for y in case.compile(loop, results=2)(x, w):
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_repeats_are_bitwise_equal(case: Case, _with_kernels: None) -> None:
    """Operands are not whole numbers, so sums depend on their order."""
    skip_without(case.devices)
    draw = np.random.default_rng(0)
    rows, contracted, columns = case.sizes
    x, w = (
        draw.standard_normal(shape).astype(jnp.dtype(case.dtype))
        for shape in ((1, rows, contracted), (contracted, columns))
    )
    run = case.compile(lambda x, w: (kernel_of(case)(x, w),))
    first = run(x, w)[0]
    for shard in first.addressable_shards[1:]:
        if case.op == "reduce":
            assert (np.asarray(shard.data) == np.asarray(first.addressable_shards[0].data)).all()
    same = functools.partial(jnp.array_equal, first)
    assert all([bool(same(run(x, w)[0])) for _ in range(REPEATS)])


@pytest.mark.parametrize("op", OPS)
def test_two_programs_at_once(op: str, _with_kernels: None) -> None:
    """Neither waits for the other on the host."""
    cases = [replace(Case(op, SIZES["several waves"]), dtype=d) for d in ("bfloat16", "float16")]
    skip_without(cases[0].devices)
    runs = [case.compile(lambda x, w, case=case: (kernel_of(case)(x, w),)) for case in cases]
    arrays = [case.arrays()[:2] for case in cases]
    for run, operands in zip(runs, arrays, strict=True):
        jax.block_until_ready(run(*operands))
    results = [[run(*a)[0] for run, a in zip(runs, arrays, strict=True)] for _ in range(REPEATS)]
    for ys in results:
        for y, (x, w) in zip(ys, arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w))
