"""Walks over jaxprs visit what they are of, and a shared jaxpr once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.walks import all_equations, distinct_equations
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


def test_auto_axes_are_found_where_calls_share_their_jaxprs() -> None:
    """A kernel's program of thousands of equations is the same in every layer."""
    assert auto_axes(jax.make_jaxpr(doubled)(1.0).jaxpr) == ()
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(4), P("a"))
        assert auto_axes(jax.make_jaxpr(lambda x: doubled(1.0) * x)(x).jaxpr) == ("b",)
