"""Random programs, each compared with its rewritten form: ``python -m tests.rewrite.fuzz``.

A program consists of layers that map x [B, S/D, M], with sharded rows, to the same shape. A seed
determines the program, on every machine and in every version of JAX. One program in fifty is
compiled, which takes several times as long as everything else. The others are simulated.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.conftest import ON_THE_CPU
from tests.reference import AXIS
from tests.rewrite.programs import Program, gradients_of, ring
from tests.rewrite.simulator import simulated

BATCH, SEQUENCE, MODEL, FEATURES = 2, 6, 4, 6
DEVICES = (2, 3)
#: One program in this number is compiled; the others are simulated.
COMPILED = 50
#: Errors as a fraction of the largest value, through a few layers and their gradients. In float32
#: sums in another order are off by this much, in bfloat16 roundings with u = 2⁻⁸. A wrong chunk is
#: off by about the largest value.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}

Layer = Callable[[jax.Array, Sequence[jax.Array]], jax.Array]


@dataclass
class Generator:
    """Draws programs.

    Attributes:
      random: the source of randomness.
      weights: shape and spec of each weight that the layers drawn so far need.
      rounds: the coarsest dtype that they compute in.
    """

    random: random.Random
    weights: list[tuple[tuple[int, ...], P]] = field(default_factory=list)
    rounds: str = "float32"

    def weight(self, *shape: int, spec: P) -> int:
        self.weights.append((shape, spec))
        return len(self.weights) - 1

    def up(self) -> int:
        return self.weight(MODEL, FEATURES, spec=P(None, AXIS))

    def down(self) -> int:
        return self.weight(FEATURES, MODEL, spec=P(AXIS))

    def sometimes(self, chance: float = 0.3) -> bool:
        return self.random.random() < chance

    # Equations between a collective and its matmul. They keep shapes.

    def between(self) -> Callable[[jax.Array], jax.Array]:
        """Up to two operations that commute with collectives; seldom one more that does not."""
        plain: list[Callable] = [
            lambda y: y * 0.5,
            lambda y: 2.0 * y / 3.0,
            lambda y: checkpoint_name(y, "between"),
            lax.optimization_barrier,
            lambda y: -y,
            lambda y: y.reshape(-1, y.shape[-1]).reshape(y.shape),
            lambda y: jnp.swapaxes(jnp.swapaxes(y, 0, 1), 0, 1),
            lambda y: jnp.expand_dims(y, 1).reshape(y.shape),
            jax.jit(lambda y: y * 0.25),
        ]
        others: list[Callable] = [jnp.tanh, lambda y: y + 0.5, lambda y: y * jnp.mean(y)]
        chosen = self.random.choices(plain, k=self.random.choice((0, 0, 1, 2)))
        if self.sometimes(0.1):
            chosen.append(self.random.choice(others))
        return lambda y: functools.reduce(lambda y, f: f(y), chosen, y)

    def gather(self) -> Callable[[jax.Array], jax.Array]:
        """[B, S/D, M] -> [B, S, M]."""
        variants: list[Callable] = [
            lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True),
            lambda x: lax.all_gather(x, AXIS, axis=1).reshape(BATCH, SEQUENCE, -1),
            lambda x: jnp.swapaxes(
                lax.all_gather(jnp.swapaxes(x, 0, 1), AXIS, axis=0, tiled=True), 0, 1
            ),
        ]
        variant, between = self.random.choice(variants), self.between()
        return lambda x: between(variant(x))

    def scatter(self) -> Callable[[jax.Array], jax.Array]:
        """[B, S, M] -> [B, S/D, M], summed over devices."""

        def by_index(y: jax.Array) -> jax.Array:
            devices = lax.axis_size(AXIS)
            y = y.reshape(BATCH, devices, SEQUENCE // devices, -1)
            return lax.psum_scatter(y, AXIS, scatter_dimension=1)

        def all_reduced(y: jax.Array) -> jax.Array:
            whole, rows = lax.psum(y, AXIS), SEQUENCE // lax.axis_size(AXIS)
            return lax.dynamic_slice_in_dim(whole, lax.axis_index(AXIS) * rows, rows, 1)

        def transposed(y: jax.Array) -> jax.Array:
            y = jnp.swapaxes(y, 0, 2)
            y = lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)
            return jnp.swapaxes(y, 0, 2)

        variants: list[Callable] = [
            lambda y: lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True),
            by_index,
            all_reduced,
            transposed,
        ]
        variant, between = self.random.choice(variants), self.between()
        return lambda y: variant(between(y))

    def product(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """[B, S, K] by [K, N] -> [B, S, N]."""
        variants: list[Callable] = [
            jnp.matmul,
            lambda x, w: jnp.einsum("bsk,kn->bsn", x, w),
            lambda x, w: (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1),
            lambda x, w: jnp.einsum("nk,bsk->bsn", w.T, x),
            lambda x, w: jnp.swapaxes(jnp.einsum("kn,bsk->nsb", w, x), 0, 2),
            lambda x, w: jnp.einsum("bsk,bkn->bsn", x, jnp.stack([w] * BATCH)),
        ]
        if self.sometimes(0.15):
            self.rounds = "bfloat16"
            variant = self.random.choice(variants)
            return lambda x, w: variant(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(
                x.dtype
            )
        return self.random.choice(variants)

    # Layers map x [B, S/D, M] to the same shape.

    def feed_forward(self) -> Layer:
        """A gather with one or more matmuls, and one or two matmuls with their scatter."""
        gather, scatter = self.gather(), self.scatter()
        ups = [(self.product(), self.up()) for _ in range(self.random.choice((1, 1, 2, 3)))]
        downs = [(self.product(), self.down()) for _ in range(self.random.choice((1, 1, 1, 2)))]
        keeps, shared = self.sometimes(), self.sometimes(0.1)

        def multiply(whole: jax.Array, ws: Sequence[jax.Array]) -> jax.Array:
            products = [product(whole, ws[w]) for product, w in ups]
            hidden = functools.reduce(jnp.multiply, map(jnp.tanh, products))
            if keeps:
                hidden = hidden + jnp.mean(jnp.sin(whole))
            return functools.reduce(jnp.add, [product(hidden, ws[w]) for product, w in downs])

        inside = jax.checkpoint(multiply) if self.sometimes(0.15) else multiply

        def layer(x: jax.Array, ws: Sequence[jax.Array]) -> jax.Array:
            y = inside(gather(x), ws)
            return scatter(y) + (jnp.mean(y) if shared else 0)

        return layer

    def elementwise(self) -> Layer:
        function = self.random.choice([jnp.tanh, jnp.sin, lambda x: x / 2, jax.nn.silu])
        return lambda x, ws: function(x)

    def contracted(self) -> Layer:
        """A matmul that contracts the gathered rows."""
        gather = self.gather()
        rows = np.cos(np.arange(BATCH * SEQUENCE * 3, dtype=np.float32))
        rows = rows.reshape(BATCH, SEQUENCE, 3)
        return lambda x, ws: x * jnp.mean(jnp.sin(jnp.einsum("bsk,bsn->kn", gather(x), rows)))

    def only_gathered(self) -> Layer:
        """A gather without a matmul."""
        gather = self.gather()
        return lambda x, ws: x * jnp.mean(gather(x))

    def wrapped(self, layer: Layer) -> Layer:
        """The layer in a call, a loop or a branch."""
        policies = jax.checkpoint_policies

        def scanned(x: jax.Array, ws: Sequence[jax.Array]) -> jax.Array:
            def step(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(layer(x, [w * scale for w in ws])), None

            return lax.scan(step, x, jnp.array([1.0, 0.5]))[0]

        def branched(x: jax.Array, ws: Sequence[jax.Array]) -> jax.Array:
            taken = ws[0][0, 0] < 1e9 if ws else True
            return lax.cond(taken, layer, lambda x, ws: 2 * x, x, list(ws))

        def custom(x: jax.Array, ws: Sequence[jax.Array]) -> jax.Array:
            fun = jax.custom_vjp(layer)
            fun.defvjp(
                lambda *args: (layer(*args), args), lambda args, dy: jax.vjp(layer, *args)[1](dy)
            )
            return fun(x, list(ws))

        variants: list[Callable] = [
            jax.jit(layer),
            jax.checkpoint(layer),
            functools.partial(jax.checkpoint, policy=policies.dots_saveable)(layer),
            scanned,
            branched,
            custom,
        ]
        return self.random.choice(variants)

    def layer(self) -> Layer:
        layer = self.random.choices(
            [self.feed_forward, self.contracted, self.elementwise, self.only_gathered],
            weights=[8, 1, 2, 1],
        )[0]()
        while self.sometimes():
            layer = self.wrapped(layer)
        if self.sometimes():
            inner = layer
            return lambda x, ws: x + inner(x, ws)
        return layer

    def program(self) -> Program:
        layers = [self.layer() for _ in range(self.random.choice((1, 1, 2)))]

        def body(x: jax.Array, *ws: jax.Array) -> jax.Array:
            return functools.reduce(lambda x, layer: layer(x, ws), layers, x)

        shapes, specs = zip(((BATCH, SEQUENCE, MODEL), P(None, AXIS)), *self.weights, strict=True)
        return Program(body, shapes, specs, P(None, AXIS), rounds=self.rounds)


def mismatch(seed: int) -> str | None:
    """How the values or gradients of a program differ from those of its rewritten form; or None."""
    generator = Generator(random.Random(seed))
    program = generator.program()
    devices = generator.random.choice(DEVICES)
    differentiated = generator.random.choice(("not", "inside", "before", "after"))
    if differentiated == "inside":
        program = program.gradients()
    check_vma = generator.sometimes(0.5)
    fun = program.sharded(_mesh(devices), check_vma)
    count = len(program.shapes)
    plain, rewritten = {
        "not": lambda: (fun, ring(fun)),
        "inside": lambda: (fun, ring(fun)),
        "before": lambda: (gradients_of(fun, count), ring(gradients_of(fun, count))),
        "after": lambda: (gradients_of(fun, count), gradients_of(ring(fun), count)),
    }[differentiated]()

    def both(*args: Any) -> tuple:
        return jax.tree.leaves(plain(*args)), jax.tree.leaves(rewritten(*args))

    run = jax.jit(both) if seed % COMPILED == 0 else simulated(both)
    what = f"seed {seed}: {devices} devices, differentiated {differentiated}, vma {check_vma}"
    for expected, actual in zip(*run(*program.arguments(seed)), strict=True):
        error = float(np.max(np.abs(np.asarray(actual) - np.asarray(expected))))
        bound = TOLERANCES[generator.rounds] * max(float(np.max(np.abs(expected))), 1e-3)
        if not error <= bound or actual.dtype != expected.dtype:
            return f"{what}: off by {error:.3g} where {bound:.3g} is allowed"
    return None


@functools.cache
def _mesh(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def mismatches(seeds: Iterable[int], every: int = 100) -> list[str]:
    """Mismatches of many programs, printed as they are found."""
    found, start = [], time.perf_counter()
    for number, seed in enumerate(seeds, 1):
        wrong = mismatch(seed)
        if wrong:
            print(wrong, flush=True)
            found.append(wrong)
        if number % every == 0:
            print(f"{number} programs, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rewrite.fuzz", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    arguments = parser.parse_args()
    for name, value in ON_THE_CPU.items():
        jax.config.update(name, value)
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    seeds = range(arguments.first, arguments.first + arguments.programs)
    found = mismatches(seeds)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {len(found)} mismatches")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
