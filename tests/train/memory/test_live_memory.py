"""The bytes that programs hold at one time, compared with what is counted by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import optimization_barrier as barrier
from jax.sharding import PartitionSpec as P

from train.memory.live_memory import find_peak

N = 32
#: Bytes of a float32 [N, N].
MATRIX = 4 * N * N


def peak(fun: Callable[..., Any], *arguments: Any, first: int = 1) -> tuple[float, float]:
    """In matrices: all, and those made of the first arguments."""
    found = find_peak(jax.make_jaxpr(fun)(*arguments).jaxpr, first)
    return found.total / MATRIX, found.of_first / MATRIX


def scanned(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, row: (c @ w, c @ w + row), w, x)[1].sum()


def viewed(w: jax.Array, x: jax.Array) -> Any:
    """A cast weight is read at the begin and at the end, by views with a dimension more."""
    half = w.astype("bfloat16")

    def product(x: jax.Array) -> jax.Array:
        view = jax.lax.broadcast_in_dim(half, (1, N, N), (1, 2))
        return jax.lax.dot_general(x, view, (((1,), (1,)), ((), ()))).sum()

    return product(x), ((x @ x) @ (x.T @ x)).sum(), product(x.T)


def leaving(w: jax.Array, x: jax.Array) -> Any:
    """A loop over rows whose body passes a cast weight to a function that does not read it."""
    half = w.astype("bfloat16")

    def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.checkpoint(lambda half, row: row @ x)(half, row).sum(), None

    return jax.lax.scan(body, jnp.zeros(()), barrier(x @ x))[0]


def summed(w: jax.Array, x: jax.Array) -> Any:
    """The sum of two products is read by two reductions, between which is another product."""
    total = x @ w + w @ x
    largest = jnp.max(total)
    return jnp.sum((x @ x) @ (x @ x)) * largest, jnp.sum(total)


def postponing(w: jax.Array, x: jax.Array) -> Any:
    """A product is multiplied again where nothing waits for it, and then in a chain of three."""
    first = x @ w
    result = first @ x
    return result, jnp.sum(((first @ w) @ x) @ w)


def largest_of(x: jax.Array) -> jax.Array:
    """By a reduction with a function of its own, of numbers in another dtype."""
    return jax.lax.reduce(x.astype("float16"), np.float16(0), jnp.maximum, (0,))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x.sum()


W = jnp.ones((N, N))
X = jnp.ones((N, N))


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        # Results are not counted, nor arguments.
        (lambda w, x: x @ w, (0, 0)),
        # The sum reads what the matmul stored, and nothing in between is stored.
        (lambda w, x: jnp.sum(jnp.tanh(x @ w) * 2), (1, 0)),
        # What a matmul reads is stored, and not in the place of another's product.
        (lambda w, x: jnp.tanh(x @ w) @ w, (2, 0)),
        # Two products at one time.
        (lambda w, x: ((x @ w) @ (w @ x)).sum(), (3, 0)),
        # A weight that was cast, [N, N] in half precision, and the product in it.
        (lambda w, x: (x.astype("bfloat16") @ w.astype("bfloat16")).sum(), (1.5, 0.5)),
        # The same twice, when the first has ended.
        (lambda w, x: (jnp.sum(x @ w), jnp.sum(w @ x)), (1, 0)),
        # Views are the same array.
        (lambda w, x: jnp.sum((x @ w).reshape(-1).reshape(N, N)), (1, 0)),
        (viewed, (3.5, 0.5)),
        # In jitted functions too.
        (lambda w, x: jnp.sum(jax.jit(lambda a: jnp.tanh(a @ w))(x)), (1, 0)),
        # A sum that goes through a barrier is stored, not its terms; then three products.
        (lambda w, x: jnp.sum(barrier(x @ w + w @ x) * ((x @ x) @ (w @ w))), (4, 1)),
        # The sum is stored instead of its terms, beside the product between its readers.
        (summed, (1 + 3, 0)),
        # The first product stays to the end, beside two of the chain.
        (postponing, (3, 0)),
        # The product that the reduction reads, and no cast of it.
        (lambda w, x: largest_of(x @ w).sum(), (1 + 0.5 / N, 0)),
        # What is read, and in the loop a row and its product. The cast weight is not stored.
        (leaving, (1 + 2 / N, 0)),
        # What is read, what is stacked, and a product inside. What is carried replaces its begin.
        (lambda w, x: scanned(w, jnp.stack([x] * 5)), (5 + 5 + 1, 0)),
    ],
)  # fmt: skip
def test_bytes_at_one_time(fun, expected):
    assert peak(fun, W, X) == pytest.approx(expected, abs=0.01)


def test_less_is_kept_if_it_is_computed_again():
    def gradient(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda w, x: jax.grad(lambda w: sum(fun(w, x + n) for n in range(8)))(w) @ w

    kept, again = (peak(gradient(fun), W, X)[0] for fun in (loss, jax.checkpoint(loss)))
    # Of each of eight: the operands of three matmuls, or the first one.
    assert kept > 8 * 3
    assert again < kept - 4


def test_between_blocks_that_are_computed_again_one_array_is_kept():
    @jax.checkpoint
    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        x += jnp.tanh(x) @ w
        return x + jnp.tanh(x) @ w

    def blocks(count: int) -> Callable[..., jax.Array]:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            for _ in range(count):
                x = block(w, x)
            return jnp.square(x).sum()

        return jax.grad(loss)

    four, eight = (peak(blocks(count), X, W)[0] for count in (4, 8))
    # Not the two products of each that it is the sum of.
    assert eight - four == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 8)])
def test_a_loop_that_gathers_slices_has_a_copy_of_all_of_them(make_mesh, size, expected):
    def of_dimension(dimension: int, w: jax.Array, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            one = jax.lax.dynamic_index_in_dim(w, number, keepdims=False)
            whole = jax.lax.all_gather(one, "devices", axis=dimension, tiled=True)
            return jnp.tanh(x @ whole[:N, :N]), None

        return jax.lax.scan(step, x, jnp.arange(8))[0]

    found = []
    for dimension in (0, 1):
        local = functools.partial(of_dimension, dimension)
        mesh, specs = make_mesh({"devices": size}), (P(None, None, "devices"), P("devices"))
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("devices"))
        found.append(peak(sharded, jnp.ones((8, N, size * N)), jnp.ones((size * N, N)))[0])
    assert found[1] - found[0] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2)])
def test_a_collective_of_one_device_makes_no_array(make_mesh, size, expected):
    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.tanh(x @ w), "devices").sum()

    def sharded(w: jax.Array, x: jax.Array) -> jax.Array:
        mesh, specs = make_mesh({"devices": size}), (P(), P("devices"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(w, x)

    # Of several devices, what travels is stored too.
    assert peak(sharded, W, jnp.ones((size * N, N)))[0] == pytest.approx(expected, abs=0.01)
