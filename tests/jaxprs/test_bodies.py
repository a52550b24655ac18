"""How equations and the jaxprs that they execute are connected, and how often these run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.bodies import Body, bodies_of, called, with_jaxprs
from collective_matmul.jaxprs.graph import type_of
from collective_matmul.jaxprs.walks import Holds, Scope, all_equations

X = jnp.arange(6.0).reshape(3, 2)
Y = jnp.ones(2)


@jax.custom_vjp
def with_rules(x: Any, y: Any) -> Any:
    return x * y


with_rules.defvjp(lambda x, y: (x * y, (x, y)), lambda kept, dy: (dy * kept[1], dy * kept[0]))


def sharded(x: Any, y: Any) -> Any:
    mesh = AbstractMesh((1,), ("t",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda x, y: (y, x), mesh=mesh, in_specs=(P("t"), P("t")), out_specs=(P("t"), P("t"))
    )(x, y)


def equation_of(fun: Callable, name: str, *arguments: Any) -> JaxprEqn:
    """The first equation with a primitive of this name."""
    program = jax.make_jaxpr(fun)(*arguments).jaxpr
    return next(e for e in all_equations(program) if e.primitive.name.startswith(name))


CALLS = {
    "jit": jax.jit(lambda x, y: (x + y, y)),
    "checkpoint": jax.checkpoint(lambda x, y: jnp.sin(x) * y),  # type: ignore[reportPrivateImportUsage]
    "custom_vjp_call": with_rules,
    "shard_map": sharded,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_one_body_with_its_operands_and_results(name: str) -> None:
    equation = equation_of(CALLS[name], {"checkpoint": "remat"}.get(name, name), X, 2 * X)
    (body,) = bodies_of(equation)
    assert body.value is called(equation) is equation.params[body.parameter]
    assert body.arguments(equation.invars) == equation.invars
    assert [*body.results] == [*range(len(body.jaxpr.outvars))]
    assert (body.carried, body.sliced, body.steps) == ((), None, 1)


def test_a_scan_carries_slices_and_has_a_length() -> None:
    def step(carry: tuple, row: Any) -> tuple:
        return (carry[0] + row @ Y, carry[1] * 2), row + carry[0]

    equation = equation_of(lambda x: lax.scan(step, (0.0, 1.0), x), "scan", X)
    (body,) = bodies_of(equation)
    assert body.steps == 3
    constants = len(equation.invars) - 3  # After them, two carries and the rows.
    assert body.carried == [(0, constants), (1, constants + 1)]
    assert (body.sliced, body.stacked) == (constants + 2, 2)
    assert body.sliced is not None
    outside, inside = equation.invars[body.sliced], body.jaxpr.invars[body.sliced]
    assert type_of(outside).shape[1:] == type_of(inside).shape


def test_a_while_loop_has_a_condition_and_a_body_with_shared_carries() -> None:
    def loop(x: Any, limit: Any, step: Any) -> Any:
        return lax.while_loop(
            lambda c: c[0].sum() < limit, lambda c: (c[0] + step, c[1] * 2), (x, x)
        )

    equation = equation_of(loop, "while", X, 20.0, 2.0)
    condition, body = bodies_of(equation)
    limit, step, *carries = range(4)
    assert list(condition.operands or ()) == [limit, *carries]
    assert list(body.operands or ()) == [step, *carries]
    assert not condition.results
    assert not condition.carried
    assert body.carried == [(0, 2), (1, 3)]
    assert condition.steps is body.steps is None


def test_branches_take_all_operands_but_the_first() -> None:
    fun = lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: 2 * x], x)  # noqa: E731
    equation = equation_of(fun, "cond", 1, X)
    bodies = bodies_of(equation)
    assert len(bodies) == 3
    for body in bodies:
        assert body.arguments(equation.invars) == equation.invars[1:]
        assert (body.parameter, body.steps) == ("branches", 1)


def test_what_other_equations_do_with_jaxprs_is_not_known() -> None:
    equation = equation_of(
        lambda x: lax.reduce(x, 1.0, lambda a, b: jnp.sin(a) * b, (0,)), "reduce", X
    )
    (body,) = bodies_of(equation)
    assert body.operands is None
    assert bodies_of(equation_of(jnp.sin, "sin", X)) == []


def test_jaxprs_are_exchanged_in_a_loop_and_in_branches() -> None:
    def fun(i: Any, x: Any) -> Any:
        return lax.cond(i > 0, jnp.sin, jnp.cos, x)

    program = jax.make_jaxpr(fun)(1, X)
    at, equation = next((i, e) for i, e in enumerate(program.jaxpr.eqns) if bodies_of(e))
    first, second = (body.value for body in bodies_of(equation))
    assert with_jaxprs(equation, [first, second]) is equation
    equations = list(program.jaxpr.eqns)
    equations[at] = with_jaxprs(equation, [second, first])
    swapped = jaxpr_as_fun(program.replace(jaxpr=program.jaxpr.replace(eqns=equations)))
    np.testing.assert_array_equal(swapped(1, X)[0], jnp.cos(X))


def test_a_scope_executes_a_program_with_calls() -> None:
    constant = jnp.full(2, 5.0)
    program = jax.make_jaxpr(lambda x: jax.jit(lambda x: x * 2 + 1)(x) + constant)(Y)

    def sizes(equation: JaxprEqn, operands: list[int]) -> list[int]:
        """Counts how many values each result is made of."""
        bodies: list[Body] = bodies_of(equation)
        if bodies:
            return Scope(bodies[0].jaxpr, operands, lambda _: 1).run(sizes)
        return [sum(operands)] * len(equation.outvars)

    assert Scope(program.jaxpr, [1], lambda _: 1).run(sizes) == [4]


def test_equations_at_any_depth() -> None:
    def fun(x: Any) -> Any:
        return lax.scan(lambda c, row: (jax.jit(lambda c: c + row @ row)(c), None), 0.0, x)[0]

    program = jax.make_jaxpr(fun)(X).jaxpr
    names = [equation.primitive.name for equation in all_equations(program)]
    assert names.index("scan") < names.index("dot_general")
    asked: list[str] = []

    def is_dot(equation: JaxprEqn) -> bool:
        asked.append(equation.primitive.name)
        return equation.primitive.name == "dot_general"

    holds = Holds(is_dot)
    assert holds(program)
    looked_at = len(asked)
    assert holds(program)
    assert len(asked) == looked_at
    assert not Holds(lambda equation: equation.primitive.name == "sin")(program)
