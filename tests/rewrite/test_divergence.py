"""Branches and loops whose predicate differs between groups of the mesh: no ring goes there.

A ring in such a place waits for ever. So the tests look at the program before they run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap
from tests.conftest import MeshFactory
from tests.rewrite.programs import assert_same, counts

Body = Callable[..., Any]


def product(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "t", tiled=True) @ w


def zeros(x: Any, w: Any) -> Any:
    return jnp.zeros((2 * x.shape[0], w.shape[1]), x.dtype)


def only_if(predicate: Any, x: Any, w: Any) -> Any:
    return lax.cond(predicate, product, zeros, x, w)


def repeated(steps: Any, x: Any, w: Any) -> Any:
    def step(carry: tuple) -> tuple:
        return carry[0] + 1, carry[1] + product(x, w)

    return lax.while_loop(lambda carry: carry[0] < steps, step, (0, zeros(x, w)))[1]


def until_large(x: Any, w: Any) -> Any:
    """The number of steps depends on what the loop computes, as in decoding."""

    def step(y: Any) -> Any:
        return 2 * y + jnp.abs(product(x, w)) + 1

    return lax.while_loop(lambda y: lax.pmax(y.max(), "t") < 10, step, zeros(x, w))


def carried_into(predicate_of: Callable) -> Body:
    """A scan whose carry starts the same everywhere, and later does not."""

    def body(x: Any, w: Any, n: Any) -> Any:
        def step(carry: Any, _: None) -> tuple:
            return predicate_of(n), only_if(carry > 0, x, w)

        return lax.scan(step, jnp.int32(1), None, length=2)[1].sum(0)

    return body


def of_argument(x: Any, w: Any, steps: Any) -> Any:
    return jax.jit(repeated)(steps, x, w)


# n differs between the groups along "d": 1 and 3. All others are the same.
DIFFERENT: dict[str, Body] = {
    "cond of the index": lambda x, w, n: only_if(lax.axis_index("d") == 0, x, w),
    "switch": lambda x, w, n: lax.switch(n[0] // 2, (product, zeros), x, w),
    "while of an argument": lambda x, w, n: repeated(n[0], x, w),
    "while inside jit": lambda x, w, n: of_argument(x, w, n[0]),
    "while of a computed value": lambda x, w, n: until_large(x * n[0], w),
    "cond inside while": lambda x, w, n: lax.fori_loop(
        0, n[0], lambda i, y: y + only_if(i >= 0, x, w), zeros(x, w)
    ),
    "checkpoint inside cond": lambda x, w, n: lax.cond(
        n[0] > 1, jax.checkpoint(product), zeros, x, w
    ),
    "sum over the other axis": lambda x, w, n: repeated(lax.psum(n[0], "t"), x, w),
    "permuted": lambda x, w, n: repeated(lax.ppermute(n[0], "d", [(0, 1), (1, 0)]), x, w),
    "carry of a scan": carried_into(lambda n: n[0] - 1),
}
SAME: dict[str, Body] = {
    "constant": lambda x, w, n: repeated(2, x, w),
    "largest": lambda x, w, n: repeated(lax.pmax(n[0], "d"), x, w),
    "gathered": lambda x, w, n: repeated(lax.all_gather(n[0], "d")[1], x, w),
    "sum": lambda x, w, n: only_if(lax.psum(n[0], "d") > 3, x, w),
    "weights": lambda x, w, n: only_if(lax.psum(w.sum(), "t") > 0, x, w),
    "own axis": lambda x, w, n: only_if(lax.axis_index("t") >= 0, x, w),
    "scan": lambda x, w, n: lax.scan(lambda y, _: (y + product(x, w), None), zeros(x, w), n)[0],
    "inside jit": lambda x, w, n: of_argument(x, w, lax.psum(n[0], "d")),
    "carry of a scan": carried_into(lambda n: lax.psum(n[0], "d")),
}


@pytest.fixture(scope="module")
def sharded(make_mesh: MeshFactory) -> Callable[..., Callable]:
    mesh = make_mesh({"d": 2, "t": 2})

    def shard(body: Body, check_vma: bool = False) -> Callable:
        specs = (P("t"), P(None, "t"), P("d"))
        return jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=P("d", "t"), check_vma=check_vma
        )

    return shard


@pytest.fixture(scope="module")
def arguments() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    x, w = (random.normal(size=size).astype("float32") for size in ((4, 8), (8, 4)))
    return [x, w, np.array([1, 3], "int32")]


@pytest.mark.parametrize("name", DIFFERENT)
def test_no_ring_where_groups_may_disagree(name: str, sharded: Callable, arguments: list) -> None:
    fun = sharded(DIFFERENT[name])
    overlapped = overlap(fun, implementation=("ring", "xla"))
    assert _permutes(overlapped, *arguments) == _permutes(fun, *arguments)
    assert_same(jax.jit(overlapped)(*arguments), jax.jit(fun)(*arguments))


@pytest.mark.parametrize("name", SAME)
def test_rings_where_all_agree(name: str, sharded: Callable, arguments: list) -> None:
    fun = sharded(SAME[name])
    overlapped = overlap(fun, implementation="ring")
    assert _permutes(overlapped, *arguments) > 0
    assert_same(jax.jit(overlapped)(*arguments), jax.jit(fun)(*arguments))


def test_one_call_in_two_places(sharded: Callable, arguments: list) -> None:
    """One jitted function, with a predicate that differs and with one that does not."""

    @jax.jit
    def called(x: Any, w: Any, n: Any) -> Any:
        return only_if(n > 1, x, w)

    fun = sharded(lambda x, w, n: called(x, w, n[0]) + called(x, w, lax.psum(n[0], "d")))
    overlapped = overlap(fun, implementation=("ring", "xla"))
    assert _permutes(overlapped, *arguments) == 1
    assert_same(jax.jit(overlapped)(*arguments), jax.jit(fun)(*arguments))


def test_gradients(sharded: Callable, arguments: list) -> None:
    """The backward of a branch has the predicate of the branch."""

    def loss(fun: Callable) -> Callable:
        return lambda x, w, n: jnp.sin(fun(x, w, n)).sum()

    fun = sharded(DIFFERENT["cond of the index"])
    either = ("ring", "xla")
    after = jax.grad(loss(overlap(fun, implementation=either)), (0, 1))
    before = overlap(jax.grad(loss(fun), (0, 1)), implementation=either)
    expected = jax.jit(jax.grad(loss(fun), (0, 1)))(*arguments)
    for gradient in (after, before):
        assert _permutes(gradient, *arguments) == 0
        assert_same(jax.jit(gradient)(*arguments), expected)


def test_types_are_tracked_too(sharded: Callable, arguments: list) -> None:
    fun = sharded(DIFFERENT["cond inside while"], check_vma=False)
    with_types = sharded(
        lambda x, w, n: lax.cond(
            n[0] > 1,
            product,
            lambda x, w: lax.pcast(zeros(x, w), "t", to="varying"),
            x,
            w,
        ),
        check_vma=True,
    )
    for each in (fun, with_types):
        assert _permutes(overlap(each, implementation=("ring", "xla")), *arguments) == 0


def test_a_nested_shard_map_inherits_the_branch(make_mesh: MeshFactory, arguments: list) -> None:
    mesh = make_mesh({"d": 2, "t": 2})

    def outer(x: Any, w: Any, n: Any) -> Any:
        inner = jax.shard_map(
            product,
            in_specs=(P("t"), P(None, "t")),
            out_specs=P(None, "t"),
            axis_names={"t"},
            check_vma=False,
        )
        zero = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
        return lax.cond(n[0] > 1, inner, lambda x, w: zero, x, w)

    fun = jax.shard_map(
        outer,
        mesh=mesh,
        in_specs=(P(), P(), P("d")),
        out_specs=P("d"),
        axis_names={"d"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        assert _permutes(overlap(fun, implementation=("ring", "xla")), *arguments) == 0


def test_the_reason_is_logged(
    sharded: Callable, arguments: list, caplog: pytest.LogCaptureFixture
) -> None:
    fun = overlap(sharded(DIFFERENT["while of an argument"]), implementation="ring_two_way")
    assert _permutes(fun, *arguments) == 0
    assert "overlap leaves all_gather alone: ring_two_way" in caplog.text
    assert "devices along 'd' may take different branches" in caplog.text


def _permutes(fun: Callable, *arguments: Any) -> int:
    return counts(fun, *arguments)["ppermute"]
