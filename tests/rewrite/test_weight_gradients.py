"""Weight gradients take gathered arrays in chunks; other users get the chunks joined.

The kernel that takes chunks does not run on CPUs. XLA's matmuls replace it here, and are counted.
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
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, matmul_reduce_scatter, overlap
from collective_matmul.mosaic_gpu.hopper_matmul import chunk_matmul
from collective_matmul.operands.arithmetic import add, contract_rows
from collective_matmul.operands.chunked import read
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
    scattering,
    sites,
)
from tests.rewrite.simulator import simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

_LLAMA, _ = programs()["llama"]
#: Shapes of one launch: rows and columns of x, and the columns of each y.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[Shapes]:
    """Counts launches by their shapes while they are traced."""
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


def with_ops(x, wq, wk, wv, wo, gate, up, down) -> jax.Array:
    """An attention and a gated feed-forward, with the ops."""

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
    """The gradients of two layers, computed inside shard_map."""
    (x, _, *weights), (of_x, _, *specs) = _LLAMA.shapes, _LLAMA.in_specs

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        # A function of its own each time, so that it is traced again.
        wrapped = wrap(lambda *operands: layer(*operands))
        return jnp.sum(jnp.tanh(wrapped(wrapped(x, *weights), *(w / 2 for w in weights))))

    gradients = jax.grad(loss, tuple(range(8)))
    return Program(gradients, [x, *weights], [of_x, *specs], (of_x, *specs))


def calls(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yields the calls of `jax.jit` in a jaxpr, at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name in ("jit", "pjit"):
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from calls(inner)


def joins(fun: Callable, *arguments: Any) -> int:
    """The number of times that gathered chunks are joined in the jaxpr of a function."""
    jaxpr = jax.make_jaxpr(fun)(*arguments)
    return sum(call.params["name"] == "whole" for call in calls(jaxpr))


@pytest.mark.parametrize(
    "wrap", [lambda layer: layer, jax.jit, jax.checkpoint], ids=["inline", "jit", "checkpoint"]
)
@simulated_or_compiled
def test_weight_gradients_are_grouped_into_launches_as_by_the_ops(
    wrap: Callable, run: Callable, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """Several weights of one gather are one launch."""
    mesh, program = make_mesh({AXIS: 2}), stacked(plain, wrap)
    # Small weights, since a stack that amplifies values also amplifies rounding errors.
    fun, arguments = program.sharded(mesh), [array / 4 for array in program.arguments()]
    assert joins(ring(fun), *arguments) == 0
    found = set(launches)
    launches.clear()
    jax.make_jaxpr(stacked(with_ops, wrap).sharded(mesh))(*arguments)
    assert found == set(launches)
    assert max(len(columns) for _, columns in found) == 3
    assert_same(*run(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def block(use: Callable[..., jax.Array]) -> Callable:
    """A function whose gradients are computed inside shard_map, with a call of its own."""

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
    """The backward needs the whole array for more than weight gradients."""
    return two(whole, w, v) * jnp.mean(jnp.tanh(whole) * whole)


def one_after_another(whole, w, v):
    """One weight is made of the product with the other."""
    return jnp.tanh(whole @ (v * jnp.mean(jnp.tanh(whole @ w))))


TAKEN_IN_CHUNKS = {"two": two, "flat": flat, "heads": heads}
JOINED = {"also squared": also_squared, "one after another": one_after_another}


def _gradients(use: Callable) -> Program:
    weights = (4, 6), (4, 6)
    return gathering(block(use), *weights, out_specs=(ROWS, COLUMNS, COLUMNS))


@pytest.mark.parametrize("name", {**TAKEN_IN_CHUNKS, **JOINED})
@simulated_or_compiled
def test_chunks_are_joined_only_for_users_that_need_the_whole_array(
    name: str, run: Callable, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    program = _gradients({**TAKEN_IN_CHUNKS, **JOINED}[name])
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert any(site.replaced for site in sites(fun, *arguments))
    launches.clear()
    assert joins(ring(fun), *arguments) == (name in JOINED)
    assert bool(launches) == (name in TAKEN_IN_CHUNKS)
    assert_same(*run(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def test_the_input_gradient_waits_for_the_weight_gradients(
    launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """The memory of the chunks is free then, as with the ops."""
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


@pytest.mark.parametrize("name", TAKEN_IN_CHUNKS)
@simulated_or_compiled
def test_gradients_of_gradients_agree(
    name: str, run: Callable, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    program = _gradients(TAKEN_IN_CHUNKS[name])
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    actual, expected = (gradients_of(f, 3) for f in (ring(fun), fun))
    assert_same(*run(lambda *args: (actual(*args), expected(*args)))(*arguments))
    assert launches


@pytest.mark.parametrize("scaled", [False, True], ids=["one launch", "two launches"])
def test_weight_gradients_that_depend_on_each_other_are_not_grouped(
    scaled: bool, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """Equations that only use the first product come after both, unless the second needs them."""

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


def test_a_residual_that_two_calls_use_is_joined(
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


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_gather_serves_both_terms_of_a_difference(
    check_vma: bool, launches: Counter[Shapes], make_mesh: MeshFactory
) -> None:
    """The gradient of a difference gathers dy, and multiplies dy and -dy."""

    def difference(h: jax.Array, w: jax.Array) -> jax.Array:
        return blocks.scatter(h @ w - jnp.sin(h) @ jnp.cos(w))

    program = scattering(difference)
    mesh, arguments = make_mesh({AXIS: 2}), program.arguments()
    plain = gradients_of(program.sharded(mesh, check_vma), 2)
    scattered, gathered = sites(plain, *arguments)
    assert (scattered.replaced, gathered.replaced, gathered.matmuls) == (True, True, 2)
    launches.clear()
    actual, expected = jax.jit(lambda *args: (ring(plain)(*args), plain(*args)))(*arguments)
    assert sum(launches.values()) == 2  # The operands of the weight gradients differ.
    assert_same(actual, expected)


@pytest.mark.parametrize("sums", ["psum_scatter", "psum"])
def test_no_gradient_of_a_stopped_weight_is_computed(make_mesh: MeshFactory, sums: str):
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        up = lax.stop_gradient(up).T
        hidden = jnp.sin(lax.all_gather(x, AXIS, axis=0, tiled=True) @ up)
        y = hidden @ jnp.reshape(lax.stop_gradient(down), (24, 12))
        if sums == "psum":
            return lax.psum(y, AXIS)
        return lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)

    result = P() if sums == "psum" else P(AXIS)
    specs = P(AXIS), P(AXIS), P(AXIS)
    program = jax.shard_map(
        block, mesh=make_mesh({AXIS: 2}), in_specs=specs, out_specs=result, check_vma=True
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (20, 12), (48, 12), (48, 3, 4)
    arguments = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def gradients(program: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *args: jnp.sum(jnp.cos(program(*args))), (0, 1, 2))

    replaced = gradients(overlap(program, implementation="ring" if sums != "psum" else "xla"))
    jaxpr = jax.make_jaxpr(replaced)(*arguments)
    assert 24 * 12 not in product_sizes(jaxpr.jaxpr)
    both = jax.jit(lambda *args: (replaced(*args), gradients(program)(*args)))
    for one, other in zip(*both(*arguments), strict=True):
        # Sums of 48 float32 numbers near 1, in another order.
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_weight_beside_a_stopped_one_has_its_gradient(make_mesh: MeshFactory):
    def block(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        x = lax.all_gather(x, AXIS, axis=0, tiled=True)
        return jnp.sin(x @ lax.stop_gradient(gate)) * (x @ up)

    specs = P(AXIS), P(None, AXIS), P(None, AXIS)
    mesh = make_mesh({AXIS: 2})
    program = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=P(None, AXIS))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (20, 12), (12, 48), (12, 48)
    arguments = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def gradients(program: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *args: jnp.sum(jnp.cos(program(*args))), (0, 1, 2))

    replaced = overlap(program, implementation="ring")
    both = jax.jit(lambda *args: [gradients(each)(*args) for each in (program, replaced)])
    for one, other in zip(*both(*arguments), strict=True):
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-4)


def product_sizes(jaxpr: Any) -> set[int]:
    """The sizes of the results of all matmuls."""
    own = {e.outvars[0].aval.size for e in jaxpr.eqns if e.primitive.name == "dot_general"}
    inner = (product_sizes(j) for e in jaxpr.eqns for j in jaxprs_in_params(e.params))
    return own.union(*inner)
