"""What a ring gathered goes to weight gradients in the chunks it came in, and is joined for others.

On CPUs the kernel that takes chunks is not there; XLA's matmuls play its part, and are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from collective_matmul import all_gather_matmul, matmul_reduce_scatter
from collective_matmul.backends.arithmetic import add, contract_rows
from collective_matmul.backends.chunked_array import read
from collective_matmul.mosaic_gpu import chunk_matmul
from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite import blocks
from tests.rewrite.blocks import attend, gather, programs, rotary
from tests.rewrite.programs import (
    COLUMNS,
    ROWS,
    Program,
    assert_same,
    gathering,
    gradients_of,
    ring,
    sites,
)

_LLAMA, _ = programs()["llama"]
#: Of one launch: the rows and columns of x, and the columns of each y.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[Shapes]:
    """Counts them where they are traced."""
    counter: Counter[Shapes] = Counter()

    def contract_chunks(xs: Any, ys: Any, *, dimension: int) -> tuple[jax.Array, ...]:
        counter[xs[0].array.shape, tuple(y.array.shape[-1] for y in ys[0])] += 1
        products = [
            [contract_rows(read(x, dimension), read(y, dimension)) for y in term]
            for x, term in zip(xs, ys, strict=True)
        ]
        return tuple(add(*terms) for terms in zip(*products, strict=True))

    monkeypatch.setattr(chunk_matmul, "contract_chunks", contract_chunks)
    return counter


def by_hand(x, wq, wk, wv, wo, gate, up, down) -> jax.Array:
    """An attention and a gated feed-forward."""

    def gathered(x, *ws):
        return all_gather_matmul(x, ws, AXIS, gather_dimension=1, implementation="ring")

    def scattered(h, w):
        return matmul_reduce_scatter(h, w, AXIS, scatter_dimension=1, implementation="ring")

    q, k, v = gathered(x, wq, wk, wv)
    mixed = attend(rotary(q), rotary(k), v)
    x = x + scattered(mixed.reshape(*mixed.shape[:2], -1), wo.reshape(-1, wo.shape[-1]))
    left, right = gathered(x, gate, up)
    return x + scattered(jax.nn.silu(left) * right, down)


def plain(x, wq, wk, wv, wo, gate, up, down) -> jax.Array:
    x = x + blocks.attention(x, wq, wk, wv, wo)
    return x + blocks.gated(x, gate, up, down)


def stacked(layer: Callable, wrap: Callable) -> Program:
    """The gradients of two layers, taken inside shard_map."""
    (x, _, *weights), (of_x, _, *specs) = _LLAMA.shapes, _LLAMA.in_specs

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        wrapped = wrap(layer)
        return jnp.sum(jnp.tanh(wrapped(wrapped(x, *weights), *(w / 2 for w in weights))))

    gradients = jax.grad(loss, tuple(range(8)))
    return Program(gradients, [x, *weights], [of_x, *specs], (of_x, *specs))


def calls(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Calls of `jax.jit` in a jaxpr, at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name in ("jit", "pjit"):
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from calls(inner)


def joins(fun: Callable, *arguments: Any) -> int:
    """How often what a ring gathered is joined, in a function's jaxpr."""
    jaxpr = jax.make_jaxpr(fun)(*arguments)
    return sum(call.params["name"] == "whole" for call in calls(jaxpr))


@pytest.mark.parametrize(
    "wrap", [lambda layer: layer, jax.jit, jax.checkpoint], ids=["inline", "jit", "checkpoint"]
)
def test_launches_are_those_of_the_ops(
    wrap: Callable, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """In the rewritten gradient of a layer, the weights of one gather share one launch."""
    mesh, program = make_mesh({AXIS: 2}), stacked(plain, wrap)
    # Small weights: a stack that amplifies its values does so with their rounding.
    fun, arguments = program.sharded(mesh), [array / 4 for array in program.arguments()]
    assert joins(ring(fun), *arguments) == 0
    found = set(launches)
    launches.clear()
    jax.make_jaxpr(stacked(by_hand, wrap).sharded(mesh))(*arguments)
    assert found == set(launches)
    assert max(len(columns) for _, columns in found) == 3
    assert_same(*jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def block(use: Callable[..., jax.Array]) -> Callable:
    """A function whose gradients are taken inside shard_map: those of a call of its own."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple:
        call = jax.jit(lambda x, w, v: use(gather(x), w, v))
        return jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), (0, 1, 2))(x, w, v)

    return body


def two(whole, w, v):
    return jnp.tanh(whole @ w) * jnp.tanh(whole @ v)


def flat(whole, w, v):
    rows = lax.reshape(whole, (8, 4))
    return jnp.tanh(rows @ w) * (rows @ v)


def heads(whole, w, v):
    q, k = (jnp.einsum("bsd,dhk->bhsk", whole, a.reshape(4, 3, 1)) for a in (w, v))
    return jnp.tanh(q) * jnp.tanh(k)


def also_squared(whole, w, v):
    """The backward needs the whole for another reason than weights."""
    return two(whole, w, v) * jnp.mean(jnp.tanh(whole) * whole)


def one_after_another(whole, w, v):
    """A weight is made of another product."""
    return jnp.tanh(whole @ (v * jnp.mean(jnp.tanh(whole @ w))))


TAKEN = {"two": two, "flat": flat, "heads": heads}
JOINED = {"also squared": also_squared, "one after another": one_after_another}


def _gradients(use: Callable) -> Program:
    weights = (4, 6), (4, 6)
    return gathering(block(use), *weights, out_specs=(ROWS, COLUMNS, COLUMNS))


@pytest.mark.parametrize("name", {**TAKEN, **JOINED})
def test_a_residual_is_joined_only_for_others(
    name: str, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    program = _gradients({**TAKEN, **JOINED}[name])
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert any(site.replaced for site in sites(fun, *arguments))
    launches.clear()
    assert joins(ring(fun), *arguments) == (name in JOINED)
    assert bool(launches) == (name in TAKEN)
    assert_same(*jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def test_the_input_gradient_waits_for_those_of_the_weights(
    launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """What the chunks take of memory is free then, as with the ops."""
    program = _gradients(two)
    jaxpr = jax.make_jaxpr(ring(program.sharded(make_mesh({AXIS: 2}))))(*program.arguments())
    barriers = [
        [var.aval.shape for var in equation.outvars]
        for call in calls(jaxpr)
        if call.params["name"] == "finished_weight_gradients"
        for equation in call.params["jaxpr"].eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    assert barriers == [[(2, 2, 4), (4, 3), (4, 3)]]
    assert launches


@pytest.mark.parametrize("name", TAKEN)
def test_gradients_of_gradients(
    name: str, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    program = _gradients(TAKEN[name])
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    actual, expected = (gradients_of(f, 3) for f in (ring(fun), fun))
    assert_same(*jax.jit(lambda *args: (actual(*args), expected(*args)))(*arguments))
    assert launches


@pytest.mark.parametrize("scaled", [False, True], ids=["one launch", "two launches"])
def test_a_launch_waits_for_no_product_of_its_own(
    scaled: bool, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """What only reads the first product comes after both, unless the second one needs it."""

    def body(x: jax.Array, w: jax.Array) -> tuple:
        whole = gather(x)
        y = jnp.tanh(whole @ w)
        first = jnp.einsum("bsd,bsf->df", whole, y)
        total = jnp.sum(jnp.cos(first))
        y = jnp.sin(y) * (total if scaled else 1.0)
        return first, total * jnp.einsum("bsd,bsf->df", whole, y)

    program = gathering(body, out_specs=(COLUMNS, COLUMNS))
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert_same(*jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))
    columns = (3,) if scaled else (3, 3)
    assert launches == {((2, 2, 4), columns): 2 if scaled else 1}


def test_a_residual_of_two_calls_is_joined(
    launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple:
        y, pull = jax.vjp(jax.jit(lambda x, w: jnp.tanh(gather(x) @ w)), x, w)
        return pull(y)[1], pull(y * y)[1]

    program = gathering(body, out_specs=(COLUMNS, COLUMNS))
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert joins(ring(fun), *arguments) == 1
    assert not launches
    assert_same(*jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))
