"""Labels that flow through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from collective_matmul.jaxprs.bodies import CONTROL_FLOW
from collective_matmul.jaxprs.propagation import Labels, Propagation

ROWS = jnp.ones((3, 2))


class Sources(Propagation):
    """Labels each value with the arguments that it depends on."""

    entered = CONTROL_FLOW

    def of_equation(self, equation: JaxprEqn, operands: Sequence[Labels]) -> Sequence[Labels]:
        assert equation.primitive.name not in CONTROL_FLOW
        return super().of_equation(equation, operands)


class FromTheStart(Sources):
    reads_initial = True


def sources(fun: Callable, *arguments: Any, kind: type[Sources] = Sources) -> list[str]:
    """For each result, the letters of the arguments that it depends on."""
    jaxpr = jax.make_jaxpr(fun)(*arguments).jaxpr
    letters = [frozenset(letter) for letter, _ in zip("abc", jaxpr.invars, strict=False)]
    found = kind().variables(jaxpr, dict(zip(jaxpr.invars, letters, strict=True)))
    atoms = jaxpr.outvars
    return ["".join(sorted(() if isinstance(v, Literal) else found[v])) for v in atoms]


def scanned(a: Any, b: Any, rows: Any) -> Any:
    """Three carries, of which each reaches the one before it in the next step."""

    def step(carry: tuple, row: Any) -> tuple:
        _, y, z = carry
        return (y, z, z), row

    return lax.scan(step, (0.0, a, b), rows)


def replaced(a: Any, b: Any, rows: Any) -> Any:
    return lax.scan(lambda c, row: (b, None), a, rows)[0]


def repeated(a: Any, b: Any, c: Any) -> Any:
    return lax.while_loop(lambda i: i[0] < c, lambda i: (i[0] + 1, i[1] * 2), (a, b))


def chosen(a: Any, b: Any, c: Any) -> Any:
    return lax.cond(a > 0, lambda b, c: (b, 1.0), lambda b, c: (c, 2.0), b, c)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jax.jit(lambda a, b, c: (b, a + c, 1.0)), ["b", "ac", ""]),
        (jax.checkpoint(lambda a, b, c: (b, a + c)), ["b", "ac"]),
        (scanned, ["ab", "b", "b", "c"]),
        (repeated, ["ac", "abc"]),
        (chosen, ["abc", "a"]),
    ],
    ids=["jit", "checkpoint", "scan", "while", "cond"],
)
def test_results_depend_on_what_they_are_made_of(fun: Callable, expected: list[str]) -> None:
    third = ROWS if fun is scanned else 1.0
    assert sources(fun, 1.0, 1.0, third) == expected


def test_what_each_step_replaces_is_read_only_where_that_is_asked_for() -> None:
    assert sources(replaced, 1.0, 1.0, ROWS) == ["b"]
    assert sources(replaced, 1.0, 1.0, ROWS, kind=FromTheStart) == ["ab"]
    assert sources(replaced, 1.0, 1.0, ROWS[:0]) == ["ab"]


def test_what_a_loop_carries_depends_on_when_it_ends() -> None:
    program = jax.make_jaxpr(repeated)(1.0, 1.0, 1.0).jaxpr
    (equation,) = (e for e in program.eqns if e.primitive.name == "while")
    limit, *carries = (frozenset(letter) for letter in "cab")
    labels, predicate = Sources().inside(equation, [limit, *carries])
    assert predicate == set("ac")
    assert labels == [limit, frozenset("ac"), frozenset("abc")]
