"""The dataflow of one jaxpr: what nothing needs, copies, and equations in another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.extend.core import Var, jaxpr_as_fun

from collective_matmul.jaxprs.dependencies import Dependencies, EquationGroup, spliced
from collective_matmul.jaxprs.graph import Graph, copied, renamed
from collective_matmul.jaxprs.walks import ByIdentity


def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    a = jnp.sin(x)  # 0
    b = jnp.cos(a)  # 1
    c = b * y  # 2
    return a, c


@pytest.fixture
def closed():
    return jax.make_jaxpr(program)(1.0, 2.0)


def test_equations_that_nothing_needs_without_their_users(closed) -> None:
    graph = Graph(closed.jaxpr)
    assert graph.unneeded([0, 1], gone=[2]) == {1}  # The first makes a result.
    assert graph.unneeded([1], gone=[]) == set()
    (b,) = graph.equations[1].outvars
    assert graph.unneeded([1], gone=[2], read=[b]) == set()


def test_a_copy_has_other_arguments_and_new_variables(closed) -> None:
    jaxpr = closed.jaxpr
    arguments = [Var(var.aval) for var in jaxpr.invars]
    equations, results = copied(jaxpr, arguments, lambda equation: equation.source_info)
    made = {var for equation in equations for var in equation.outvars}
    assert made.isdisjoint(var for equation in jaxpr.eqns for var in equation.outvars)
    copy = closed.replace(jaxpr=jaxpr.replace(invars=arguments, eqns=equations, outvars=results))
    assert jaxpr_as_fun(copy)(1.0, 2.0) == jaxpr_as_fun(closed)(1.0, 2.0)


def test_a_variable_may_be_replaced_by_one_that_is_replaced(closed) -> None:
    (x, y), (z,) = closed.jaxpr.invars, closed.jaxpr.eqns[0].outvars
    assert renamed([x, z], {x: y, y: z}) == [z, z]


def test_spliced_equations_come_after_what_they_read(closed) -> None:
    """The second equation is put before the first."""
    first, second, third = closed.jaxpr.eqns
    jaxpr = spliced(closed.jaxpr, [(0, first), (2, third)], [(0, [second])])
    assert jaxpr.eqns == [first, second, third]


def test_results_are_made_once_for_an_object_and_a_key() -> None:
    made, sources = ByIdentity[list](), [[], []]
    first = made.get(sources[0], "key", list)
    assert made.get(sources[0], "key", list) is first
    assert made.get(sources[0], "other", list) is not first
    assert made.get(sources[1], "key", list) is not first


def test_effects_keep_their_order() -> None:
    """The second of two effects could come at once, and the first waits for two equations."""

    def printing(x: jax.Array) -> jax.Array:
        y = jnp.cos(jnp.sin(x))
        jax.debug.print("{}", y)
        jax.debug.print("{}", x)
        return y

    jaxpr = jax.make_jaxpr(printing)(1.0).jaxpr
    sine, cosine, first, second = jaxpr.eqns
    moved = spliced(jaxpr, [(1, second), (2, sine), (3, cosine)], [(0, [first])])
    assert moved.eqns == [sine, cosine, first, second]


def test_an_effect_waits_for_those_before_it() -> None:
    def reading(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return io_callback(lambda: 2.0, jax.ShapeDtypeStruct((), "float32"))

    graph = Graph(jax.make_jaxpr(reading)(1.0).jaxpr)
    (read,) = graph.results
    assert not Dependencies(graph).allows(EquationGroup(frozenset({0}), (read,)))
