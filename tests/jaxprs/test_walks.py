"""Walks over jaxprs visit what they are of, and a shared jaxpr once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.walks import (
    all_equations,
    counted_equations,
    distinct_equations,
)
from collective_matmul.rewrite.find.placements import auto_axes

DEPTH = 40


def doubled(x: Any, depth: int = DEPTH) -> jax.Array:
    """Calls one function twice, which calls another twice, and so on: 2**depth sines."""
    fun = jnp.sin
    for _ in range(depth):
        fun = jax.jit(lambda x, fun=fun: fun(fun(x)))
    return fun(x)


def test_distinct_equations_are_those_of_each_jaxpr_in_the_order_of_the_program() -> None:
    program = jax.make_jaxpr(lambda x: jnp.cos(doubled(x, 2)))(1.0).jaxpr
    found = [equation.primitive.name for equation in distinct_equations(program)]
    assert [name for name in found if name in ("sin", "cos")] == ["sin", "sin", "cos"]
    every = [equation.primitive.name for equation in all_equations(program)]
    assert every.count("sin") == 4
    assert list(dict.fromkeys(every)) == list(dict.fromkeys(found))


def test_counted_equations_have_the_steps_of_all_loops_around_them() -> None:
    def fun(x: jax.Array) -> jax.Array:
        def inner(_: int, x: jax.Array) -> jax.Array:
            return jnp.sin(x)

        def outer(_: int, x: jax.Array) -> jax.Array:
            return jnp.cos(jax.lax.fori_loop(0, 3, inner, x))

        return jax.lax.while_loop(jnp.all, jnp.tan, jax.lax.fori_loop(0, 2, outer, x))

    (call,) = jax.make_jaxpr(jax.jit(fun))(1.0).jaxpr.eqns
    runs = {equation.primitive.name: runs for equation, runs in counted_equations(call)}
    assert [runs[name] for name in ("scan", "cos", "sin", "tan")] == [2, 2, 6, 1]


def test_auto_axes_are_found_where_calls_share_their_jaxprs() -> None:
    """A kernel's program of thousands of equations is the same in every layer."""
    assert auto_axes(jax.make_jaxpr(doubled)(1.0).jaxpr) == ()
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(4), P("a"))
        assert auto_axes(jax.make_jaxpr(lambda x: doubled(1.0) * x)(x).jaxpr) == ("b",)
