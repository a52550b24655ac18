"""Matmuls of half-precision arrays in float32, which sites execute in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.programs import (
    COLUMNS,
    CONTRACTED,
    ROWS,
    Program,
    assert_same,
    collectives,
    gathering,
    ring,
    sites,
)
from tests.rewrite.simulator import simulated


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Accumulates in float32 on every platform, and rounds once."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
    hidden = jnp.tanh(matmul(whole, up))
    return lax.psum_scatter(matmul(hidden, down), AXIS, scatter_dimension=1, tiled=True)


def float32_matmuls(fun: Callable, *arguments: Any) -> int:
    """The number of matmuls in the jaxpr of a function that read or make float32 arrays."""

    def count(jaxpr: Any) -> int:
        number = 0
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            dtypes = {atom.aval.dtype for atom in (*equation.invars, *equation.outvars)}
            number += equation.primitive.name == "dot_general" and jnp.dtype("float32") in dtypes
            number += sum(map(count, jaxprs_in_params(equation.params)))
        return number

    return count(jax.make_jaxpr(fun)(*arguments))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_gradients_of_matmuls_in_float32(wrap: Callable, make_mesh: MeshFactory) -> None:
    """A backward multiplies widened cotangents: half precision computes the same."""
    specs = ROWS, COLUMNS, CONTRACTED
    program = Program(
        wrap(mlp), [(2, 4, 6), (6, 4), (4, 6)], specs, specs, dtype="bfloat16"
    ).gradients()
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert all(site.replaced for site in sites(fun, *arguments))
    assert collectives(ring(fun), *arguments) == {}
    assert float32_matmuls(ring(fun), *arguments) == 0 < float32_matmuls(fun, *arguments)
    assert_same(
        *simulated(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments), rounds="bfloat16"
    )


def test_matmuls_that_no_site_executes_stay_in_float32(make_mesh: MeshFactory) -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
        return matmul(whole, w) + matmul(jnp.sin(whole), w)

    program = gathering(body, dtype="bfloat16")
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert [site.replaced for site in sites(fun, *arguments)] == [True]
    assert float32_matmuls(ring(fun), *arguments) == 1
