"""One fused op at one size: its programs, and what must be zero if it is right.

Right means three things. Of sums that have few terms, all whole numbers, every partial sum is
exact, so that results equal a plain matmul's bit for bit, with new operands in every turn of a
loop: a row of an earlier turn shows. The same holds with random delays between sends. And results
of random operands repeat bit for bit.

Legend of global shapes: M rows; K features; F hidden features. A gather multiplies [M, K] by
[K, F], F sharded; sums multiply [M, F] by [F, K], F sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import mosaic_example
from benchmarks.communication import AXIS
from collective_matmul import overlap_jit
from collective_matmul.backends import BACKENDS
from collective_matmul.backends.arithmetic import matmul
from collective_matmul.backends.fused import all_gather
from collective_matmul.tuning.timing import Timing

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Model = Literal["8B", "70B", "small", "tiny"]
FEATURES: dict[Model, tuple[int, int]] = {
    "8B": (4096, 14_336),
    "70B": (8192, 28_672),
    "small": (8192, 8192),
    "tiny": (256, 512),
}
#: Of sums of whole numbers; bfloat16 has all to 256, eight times as many.
_DEVIATION = 30


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: Op
    model: Model
    rows: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.model} M={self.rows}"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Global, of x and w."""
        features, hidden = FEATURES[self.model]
        if self.op == "all_gather_matmul":
            return (self.rows, features), (features, hidden)
        return (self.rows, hidden), (hidden, features)

    @property
    def specs(self) -> tuple[P, P, P]:
        """Of x, w and the result."""
        if self.op == "all_gather_matmul":
            return P(AXIS), P(None, AXIS), P(None, AXIS)
        return P(None, AXIS), P(AXIS), P(AXIS) if self.op == "matmul_reduce_scatter" else P()


Way = Callable[[jax.Array, jax.Array], jax.Array]


def way_of(contender: str, op: Op) -> Way:
    """What carries out an op: a function of local x and w."""
    if contender == "mosaic_example":
        if op != "all_gather_matmul":
            raise ValueError(f"JAX's Mosaic example has no {op}")
        return lambda x, w: mosaic_example.all_gather_matmul(x, w, AXIS)
    if contender == "ceiling":
        return matmul
    if contender == "fused_delayed":
        implementation: Any = SimpleNamespace(
            all_gather_matmul=functools.partial(all_gather.all_gather_matmul, race_delays=True)
        )
    elif contender == "fused" and op == "all_gather_matmul":
        implementation = all_gather
    else:
        implementation = BACKENDS[contender]
    run = getattr(implementation, op)
    if op == "all_gather_matmul":
        return lambda x, w: run(x, [w], AXIS, dimension=0)[0][0]
    if op == "matmul_reduce_scatter":
        return lambda x, w: run([x], [w], AXIS, dimension=0)[0]
    return lambda x, w: run(x, w, AXIS)


def reference(op: Op, x: jax.Array, w: jax.Array) -> jax.Array:
    """The op in float32, rounded once."""
    if op == "all_gather_matmul":
        x = lax.all_gather(x, AXIS, axis=0, tiled=True)
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    if op == "matmul_reduce_scatter":
        y = lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)
    elif op == "matmul_all_reduce":
        y = lax.psum(y, AXIS)
    return y.astype(x.dtype)


def differing(a: jax.Array, b: jax.Array) -> jax.Array:
    """How many elements differ in any bit, on all devices."""
    bits = [lax.bitcast_convert_type(array, jnp.uint16) for array in (a, b)]
    return lax.psum(jnp.sum((bits[0] != bits[1]).astype(jnp.int32)), AXIS)


def whole_numbers(key: jax.Array, shape: tuple[int, ...], contracted: int, dtype: Any) -> jax.Array:
    """So few that are not zero that any part of a sum of so many products is exact."""
    density = min(1.0, _DEVIATION / contracted**0.5)
    signs = jax.random.rademacher(key, shape, jnp.int8)
    some = jax.random.bernoulli(jax.random.fold_in(key, 1), density, shape)
    return (signs * some).astype(dtype)


class Checks:
    """What must be zero: each counts elements that are wrong, in so many turns of a loop."""

    def __init__(self, case: Case, mesh: Mesh, dtype: Any, turns: int):
        self.case, self.mesh, self.dtype, self.turns = case, mesh, dtype, turns

    def exact(self, way: Way) -> Callable[[], int]:
        """Differences from the reference where every sum is exact."""
        contracted = self.case.shapes[1][0]

        def turn(way: Way, key: jax.Array, x_shape: Any, w_shape: Any) -> jax.Array:
            x = whole_numbers(jax.random.fold_in(key, 2), x_shape, contracted, self.dtype)
            w = whole_numbers(jax.random.fold_in(key, 3), w_shape, contracted, self.dtype)
            return differing(way(x, w), reference(self.case.op, x, w))

        return self._in_a_loop(functools.partial(turn, way))

    def repeated(self, way: Way) -> Callable[[], int]:
        """Differences between two results of the same operands."""

        def turn(key: jax.Array, x_shape: Any, w_shape: Any) -> jax.Array:
            x = jax.random.normal(key, x_shape, self.dtype)
            w = jax.random.normal(jax.random.fold_in(key, 1), w_shape, self.dtype)
            first = way(x, w)
            # Else XLA would see that both are the same.
            x, w, first = lax.optimization_barrier((x, w, first))
            return differing(way(x, w), first)

        return self._in_a_loop(turn)

    def _in_a_loop(self, turn: Callable[[jax.Array, Any, Any], jax.Array]) -> Callable[[], int]:
        specs = self.case.specs[:2]
        local = [
            NamedSharding(self.mesh, spec).shard_shape(shape)
            for spec, shape in zip(specs, self.case.shapes, strict=True)
        ]

        def loop(seeds: jax.Array) -> jax.Array:
            def step(wrong: jax.Array, seed: jax.Array) -> tuple[jax.Array, None]:
                key = jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS))
                return wrong + turn(key, *local), None

            return lax.scan(step, jnp.int32(0), seeds)[0]

        sharded = jax.shard_map(loop, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        seeds = jnp.arange(self.turns, dtype=jnp.uint32)
        compiled = overlap_jit(sharded, peer_kernels=True).lower(seeds).compile()
        return lambda: int(compiled(seeds))


def chain(case: Case, contender: str, mesh: Mesh, dtype: Any, layers: int) -> Any:
    """Compiles the op over and over: the next starts when the last has ended."""
    x_spec, w_spec, y_spec = case.specs
    if contender == "ceiling":
        # Gathered already; and what is summed stays this device's part of the sum.
        x_spec = P() if case.op == "all_gather_matmul" else x_spec
        y_spec = y_spec if case.op == "all_gather_matmul" else P(AXIS)
    specs = x_spec, w_spec, y_spec
    return lowered_chain(case, way_of(contender, case.op), specs, mesh, dtype, layers).compile()


def lowered_chain(
    case: Case,
    way: Way,
    specs: tuple[P, P, P],
    mesh: Mesh,
    dtype: Any,
    layers: int,
) -> Any:
    """A way to carry out the op, over and over; lowered once, for all layers share its trace."""
    op = jax.jit(way)

    def run(x: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
        results = []
        for w in ws:
            y = op(x, w)
            x, y = lax.optimization_barrier((x, y))
            results.append(y)
        return results

    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=False)
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(case.shapes, specs[:2], strict=True)
    )
    return overlap_jit(sharded, peer_kernels=True).lower(x, [w] * layers)


def quartiles(timing: Timing, layers: int) -> list[float]:
    """In microseconds per op, of a chain's times."""
    first, third = timing.quartiles
    return [1e6 * seconds / layers for seconds in (first, timing.median, third)]


def random_arrays(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, seeds: Iterable[int]
) -> list[jax.Array]:
    """Numbers that take as much power to multiply as a program's; drawn by one executable."""

    def draw(seed: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    compiled = jax.jit(draw, out_shardings=sharding)
    return [compiled(jnp.uint32(seed)) for seed in seeds]
