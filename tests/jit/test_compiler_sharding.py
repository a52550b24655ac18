"""Where the compiler shards arrays, it is known whether it communicates. XLA is asked too."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul.jaxprs.sources import described
from collective_matmul.jit.compiler_sharding import communications
from collective_matmul.layers import Column, Heads, Row
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.reference import AXIS

DEVICES = 4
X = np.ones((16, 32), np.float32)
W = np.ones((32, 64), np.float32)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh(
        (DEVICES,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )


def blamed(fun: Callable, *args: Any) -> tuple[str | None, list[str]]:
    """The operation for which XLA may communicate, and the names of the collectives it compiles."""
    traced = overlap_jit(fun, peer_kernels=False).trace(*args)
    found = communications(traced.jaxpr.jaxpr, {AXIS: DEVICES})
    text = traced.lower().compile().as_text()
    collectives = r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\w*\(.*"
    name = found[0].operation.equation.primitive.name if found else None
    return name, re.findall(collectives, text or "")


class Maps:
    """Calls of `shard_map` that shard rows, columns, or nothing."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.rows, self.columns, self.whole = map(self._map, (P(AXIS), P(None, AXIS), P()))

    def _map(self, spec: P) -> Callable:
        return jax.shard_map(
            lambda x: 2 * x, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )

    def constrained(self, x: jax.Array, *spec: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))


def _loop(step: Callable, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (step(x), None), x, length=3)[0]


#: Each of these leaves its arrays as they are sharded.
LOCAL: dict[str, Callable[[Maps, Any], Any]] = {
    "elementwise": lambda to, x: jnp.where(to.rows(x) > 0, jax.nn.gelu(to.rows(x)), 1.0),
    "residual": lambda to, x: x + to.rows(jnp.tanh(x)),
    "norm": lambda to, x: to.rows(x) / (1 + jnp.square(to.rows(x)).mean(-1, keepdims=True)),
    "softmax": lambda to, x: jax.nn.softmax(to.rows(x)),
    "argmax": lambda to, x: to.rows(x).argmax(1),
    "dot_general": lambda to, x: to.rows(x) @ W,
    "batched": lambda to, x: jnp.einsum("sd,sd->s", to.rows(x), to.rows(x)),
    "transpose": lambda to, x: to.columns(to.rows(x).T),
    "reshape": lambda to, x: to.rows(x).reshape(8, 2, 1, 32).reshape(-1),
    "broadcast": lambda to, x: to.rows(x)[:, None] + jnp.ones((1, 3, 32)),
    "slice": lambda to, x: jnp.roll(to.rows(x), 1, 1)[:, 2:5],
    "concatenate": lambda to, x: jnp.concatenate([to.rows(x), to.rows(x)], 1),
    "split": lambda to, x: jnp.split(to.rows(x), 2, 1)[0],
    "pad": lambda to, x: jnp.pad(to.rows(x), ((0, 0), (1, 1))),
    "sort": lambda to, x: jnp.sort(jnp.cumsum(to.rows(x), 1), 1),
    "update": lambda to, x: lax.dynamic_update_slice(
        to.rows(x), jnp.ones((16, 1), x.dtype), (0, 2)
    ),
    "take": lambda to, x: jnp.take(to.rows(x), jnp.arange(4), axis=1),
    "lookup": lambda to, x: jnp.take(W, to.rows(x)[:, 0].astype(int), axis=0),
    "each": lambda to, x: jnp.take_along_axis(to.rows(x), jnp.zeros((16, 1), int), 1),
    "each updated": lambda to, x: jax.vjp(
        lambda x: jnp.take_along_axis(to.rows(x), jnp.ones((16, 1), int), 1), x
    )[1](jnp.ones((16, 1)))[0],
    "columns updated": lambda to, x: to.rows(x).at[:, jnp.array([3, 5])].add(1.0),
    "random": lambda to, x: to.rows(x) + jax.random.normal(jax.random.key(0), x.shape),
    "scan": lambda to, x: _loop(lambda x: jnp.tanh(to.rows(x)), x),
    "fori_loop": lambda to, x: lax.fori_loop(0, 3, lambda _, x: to.rows(x) + 1, x),
    "cond": lambda to, x: lax.cond(jnp.sum(W) > 0, to.rows, jnp.sin, x),
    "jit": lambda to, x: jax.jit(lambda x: to.rows(x) + 1)(to.rows(x)),
    "checkpoint": lambda to, x: jax.checkpoint(lambda x: to.rows(x) + 1)(to.rows(x)),
    "custom_jvp": lambda to, x: jax.nn.relu(to.rows(x)),
    "constraint": lambda to, x: to.constrained(to.rows(x), AXIS),
    "free": lambda to, x: jnp.sort(x, 0) @ W + jnp.fft.fft(x).real @ W,
}
#: The operation for which XLA communicates.
COMMUNICATING: dict[str, tuple[Callable[[Maps, Any], Any], str]] = {
    "add": (lambda to, x: to.rows(x) + to.columns(x), "shard_map"),
    "other": (lambda to, x: to.columns(to.rows(x)), "shard_map"),
    "whole": (lambda to, x: to.whole(to.rows(x)), "shard_map"),
    "backwards": (lambda to, x: (lambda y: to.rows(y) + to.whole(y))(2 * jnp.tanh(x)), "shard_map"),
    "two dimensions": (lambda to, x: to.rows(x) + to.rows(x.T).T, "shard_map"),
    "constraint": (lambda to, x: to.constrained(to.rows(x)), "sharding_constraint"),
    "sum": (lambda to, x: to.rows(x).sum(0), "reduce_sum"),
    "argmax": (lambda to, x: to.rows(x).argmax(0), "argmax"),
    "dot_general": (lambda to, x: to.columns(x) @ W, "dot_general"),
    "gram": (lambda to, x: to.rows(x) @ to.rows(x).T, "dot_general"),
    "uneven": (lambda to, x: to.rows(x).reshape(2, 8, 32), "reshape"),
    "merged": (lambda to, x: to.columns(x).reshape(-1), "reshape"),
    "slice": (lambda to, x: to.rows(x)[:3], "slice"),
    "cut before": (lambda to, x: to.rows(jnp.sin(x).T[:16]), "slice"),
    "concatenate": (lambda to, x: jnp.concatenate([to.rows(x), to.rows(x)]), "concatenate"),
    "pad": (lambda to, x: jnp.pad(to.rows(x), ((1, 1), (0, 0))), "pad"),
    "shifted": (lambda to, x: lax.pad(to.rows(x), 0.0, ((1, -1, 0), (0, 0, 0))), "pad"),
    "cumsum": (lambda to, x: jnp.cumsum(to.rows(x), 0), "cumsum"),
    "rev": (lambda to, x: to.rows(x)[::-1], "rev"),
    "take": (lambda to, x: jnp.take(to.rows(x), jnp.arange(4), axis=0), "gather"),
    "updated": (
        lambda to, x: jnp.zeros((48, 32)).at[jnp.arange(16) % 5].add(to.rows(x)),
        "scatter-add",
    ),
    "scan": (lambda to, x: lax.scan(lambda c, y: (c + y, c), W[0, :32], to.rows(x))[0], "scan"),
    "carry": (lambda to, x: _loop(lambda x: to.columns(to.rows(x)), x), "shard_map"),
    "predicate": (
        lambda to, x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: to.rows(x) + 1, x),
        "slice",
    ),
    "branch": (
        lambda to, x: lax.cond(x[0, 0] > 0, lambda x: to.rows(x).sum(0), lambda x: x.sum(0), x),
        "slice",
    ),
    "jit": (
        lambda to, x: jax.jit(lambda x: x + 1, in_shardings=NamedSharding(to.mesh, P(None, AXIS)))(
            to.rows(x)
        ),
        "jit",
    ),
    "unknown": (lambda to, x: lax.top_k(to.rows(x), 2)[0], "top_k"),
}


def words_for(fun: Callable, *args: Any) -> str:
    """The operation for which XLA may communicate, in words, with its place."""
    program = overlap_jit(fun, peer_kernels=False).trace(*args).jaxpr.jaxpr
    found, *_ = communications(program, {AXIS: DEVICES})
    return described(found.operation.equation, found.operation.calls)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_operations_that_communicate_are_named_with_the_line_of_the_program(
    name: str, mesh: Mesh
) -> None:
    """Also inside a function that JAX jits for itself, of which no line is in the program."""
    fun = functools.partial(COMMUNICATING[name][0], Maps(mesh))
    assert re.fullmatch(rf".* at {Path(__file__).name}:\d+", words_for(fun, X))


@pytest.mark.parametrize(
    "inside", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["alone", "jit", "checkpoint"]
)
def test_the_gradient_of_an_embedding_is_named_with_the_line_of_its_call(
    inside: Callable, mesh: Mesh
) -> None:
    """Both calls of `jnp.take` share one program, and tokens are sharded for the second alone."""

    def pulled_back(first: jax.Array, second: jax.Array, tokens: jax.Array) -> Any:
        sharded = Maps(mesh).rows(tokens)

        def looked_up(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.take(first, jnp.arange(16), axis=0)
            return x, jnp.take(second, sharded, axis=0)

        results, pull = jax.vjp(inside(looked_up), first, second)
        return pull(jax.tree.map(jnp.sin, results))

    *_, line = inspect.getsourcelines(pulled_back)
    words = words_for(pulled_back, W, W, np.zeros(16, int))
    assert words == f"scatter-add at {Path(__file__).name}:{line + 5}"


@pytest.mark.parametrize("name", LOCAL)
def test_operations_that_need_no_communication(name: str, mesh: Mesh) -> None:
    maps = Maps(mesh)
    assert blamed(lambda x: LOCAL[name](maps, x), X) == (None, [])


@pytest.mark.parametrize("name", COMMUNICATING)
def test_operations_that_communicate(name: str, mesh: Mesh) -> None:
    maps = Maps(mesh)
    fun, expected = COMMUNICATING[name]
    operation, collectives = blamed(lambda x: fun(maps, x), X)
    assert operation == expected
    assert collectives


@pytest.mark.parametrize("name", COMMUNICATING)
def test_what_xla_gathers_and_sums_is_at_most_what_is_counted(name: str, mesh: Mesh) -> None:
    """Asked of programs where the arrays are known."""
    maps = Maps(mesh)
    traced = jax.jit(lambda x: COMMUNICATING[name][0](maps, x)).trace(X)
    found = communications(traced.jaxpr.jaxpr, {AXIS: DEVICES})
    if any(each.gathered is None for each in found):
        assert name in UNKNOWN
        return
    assert name not in UNKNOWN
    counted = [
        max(sum(each.gathered or ()), 2 * sum(each.summed)) * each.operation.runs for each in found
    ]
    text = traced.lower().compile().as_text() or ""
    sent = [_bytes_of(*each) for each in re.findall(_ARRAYS_OF_COLLECTIVES, text)]
    assert sent
    assert sum(sent) <= sum(counted)


_ARRAYS_OF_COLLECTIVES = (
    r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
#: Programs in `COMMUNICATING` where XLA may communicate arrays of other operations.
UNKNOWN = {
    *("add", "other", "whole", "backwards", "two dimensions", "constraint", "gram", "uneven"),
    *("carry", "jit"),
}


def _bytes_of(arrays: str, collective: str) -> int:
    """The bytes that each device sends about, of results as XLA writes them; all have 4 bytes."""
    shapes = re.findall(r"[a-z]+32\[([\d,]*)\]", arrays)
    elements = sum(math.prod(map(int, filter(None, each.split(",")))) for each in shapes)
    return 4 * elements * (2 if collective == "all-reduce" else 1)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, decode: bool = False):
        self.attention_norm = nnx.RMSNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=decode, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=not self.attention.decode)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.embed = nnx.Embed(48, 32, rngs=rngs)
        self.block = Block(rngs, **options)
        self.head = nnx.Linear(32, 48, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.block(self.embed(tokens)))


PLAN = {"block.attention": Heads(), "block.up": Column(), "block.down": Row()}


def _loss(model: Model, tokens: jax.Array) -> jax.Array:
    return (model(tokens) ** 2).mean()


@pytest.mark.parametrize(
    ("fun", "tokens", "expected", "count"),
    [
        (lambda model, tokens: model(tokens), 8, None, 4),
        (lambda model, tokens: model(tokens), 1, None, 2),
        (lambda model, tokens: model(tokens)[:, -1], 8, "slice", 5),
        (nnx.grad(_loss), 8, "reduce_sum", 5),
    ],
    ids=["forward", "one token", "last token", "gradient"],
)
def test_layers_of_a_flax_model(
    fun: Callable, tokens: int, expected: str | None, count: int, mesh: Mesh
) -> None:
    """Between its layers, XLA shards arrays as they do."""
    model = parallelize(Model(nnx.Rngs(0)), PLAN, mesh=mesh)
    operation, collectives = blamed(fun, model, np.zeros((2, tokens), int))
    assert operation == expected
    assert len(collectives) == count if expected is None else len(collectives) >= count


def test_decoding_with_a_flax_model(mesh: Mesh) -> None:
    model = parallelize(Model(nnx.Rngs(0), decode=True), PLAN, mesh=mesh)
    model.block.attention.init_cache((2, 16, 32))
    operation, collectives = blamed(lambda model, token: model(token), model, np.zeros((2, 1), int))
    assert operation is None
    assert len(collectives) == 2  # Sums of attention and of the feed-forward layer.


def test_explicit_axes_are_read_from_types() -> None:
    mesh = jax.make_mesh(
        (DEVICES,), (AXIS,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:DEVICES]
    )
    rows, whole = (jax.device_put(X, NamedSharding(mesh, spec)) for spec in (P(AXIS), P()))
    for fun, expected in (
        (lambda x, y: jnp.sin(x).mean(1), None),
        (lambda x, y: x.sum(0), "reduce_sum"),
        (lambda x, y: x + jax.sharding.reshard(y, NamedSharding(mesh, P(AXIS))), None),
        (lambda x, y: y + jax.sharding.reshard(x, NamedSharding(mesh, P())), "reshard"),
    ):
        operation, collectives = blamed(fun, rows, whole)
        assert operation == expected
        assert bool(collectives) == bool(expected)
