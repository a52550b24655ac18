"""Programs without what computes nothing that they return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from collective_matmul.jaxprs.dead_code import without_dead_code
from collective_matmul.jaxprs.walks import all_equations


def names_of(program: Jaxpr) -> list[str]:
    return [equation.primitive.name for equation in all_equations(program)]


def body(x: Any) -> Any:
    """A barrier of three, of which two are needed."""
    dead, sine, cosine = lax.optimization_barrier((jnp.exp(x), jnp.sin(x), jnp.cos(x)))
    jnp.tan(dead)
    return sine + cosine


def scanned(x: Any) -> Any:
    return lax.scan(lambda x, _: (body(x), None), x, length=2)[0]


@pytest.mark.parametrize("fun", [body, jax.jit(body), jax.checkpoint(body), scanned])
def test_an_operand_of_a_barrier_is_not_computed_for_the_others(fun: Any) -> None:
    closed = jax.make_jaxpr(fun)(jnp.ones(3))
    live = without_dead_code(closed.jaxpr)
    names = names_of(live)
    assert "exp" in names_of(closed.jaxpr) and "exp" not in names and "tan" not in names
    (barrier,) = [e for e in all_equations(live) if e.primitive.name == "optimization_barrier"]
    assert len(barrier.invars) == len(barrier.outvars) == 2
    x = jnp.linspace(0.0, 1.0, 3)
    (y,) = jaxpr_as_fun(closed.replace(jaxpr=live))(x)
    np.testing.assert_array_equal(y, fun(x))


def test_barriers_that_follow_each_other_stay_two() -> None:
    def fun(x: Any) -> Any:
        return lax.optimization_barrier(lax.optimization_barrier((x, 2 * x)))

    program = jax.make_jaxpr(fun)(1.0).jaxpr
    assert names_of(without_dead_code(program)) == names_of(program)


def test_a_program_without_dead_code_stays_the_same() -> None:
    program = jax.make_jaxpr(lambda x: (body(x), jnp.tan(x)))(1.0).jaxpr
    live = without_dead_code(program)
    assert str(without_dead_code(live)) == str(live)
