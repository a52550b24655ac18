"""Equations that compute again what a program has computed already.

XLA computes it once: equal operations on equal operands are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from collective_matmul.jaxprs.bodies import CALLS, CONTROL_FLOW, Body, bodies_of
from collective_matmul.jaxprs.graph import is_pure
from collective_matmul.jaxprs.walks import Scope

#: What a variable is: equal for variables that have the same values.
_Value = Hashable


def repeats(
    program: Jaxpr, selects: Callable[[JaxprEqn], bool]
) -> Iterator[tuple[JaxprEqn, JaxprEqn, int]]:
    """Yields the selected equations that repeat an earlier one.

    Two equations are equal if they have the same primitive, parameters and operands, where operands
    are followed into calls and shard_maps, and not into kernels. What a loop or a branch executes
    is equal to other equations in it alone, and what `jax.checkpoint` computes again to none
    before.

    Args:
      program: the traced program.
      selects: whether an equation is of interest.

    Yields:
      The equation, the first one that is equal, and how often the program runs the equation. A
      loop whose number of steps is computed counts one step.
    """
    yield from _Numbering(selects).of_program(program)


class _Numbering:
    """Numbers the values of a program, so that equal ones have the same number."""

    def __init__(self, selects: Callable[[JaxprEqn], bool]):
        self._selects = selects
        self._numbers = itertools.count()
        self._first: dict[tuple, tuple[JaxprEqn, list[_Value]]] = {}
        self._found: list[tuple[JaxprEqn, JaxprEqn, int]] = []
        self._kept_alive: list[Any] = []  # So that no other parameter gets the id of one.

    def of_program(self, program: Jaxpr) -> list[tuple[JaxprEqn, JaxprEqn, int]]:
        self._of_jaxpr(program, self._new(program.invars), 1)
        return self._found

    def _of_jaxpr(self, jaxpr: Jaxpr, arguments: Sequence[_Value], runs: int) -> list[_Value]:
        def outside(atom: Any) -> _Value:
            if isinstance(atom, Literal):
                return "literal", str(atom.val), str(atom.aval)
            return next(self._numbers)

        scope = Scope(jaxpr, arguments, outside)
        return scope.run(lambda equation, operands: self._of_equation(equation, operands, runs))

    def _of_equation(
        self, equation: JaxprEqn, operands: list[_Value], runs: int
    ) -> Sequence[_Value]:
        bodies = bodies_of(equation)
        name = equation.primitive.name
        if len(bodies) == 1 and bodies[0].operands is not None:
            if name in CALLS:
                is_barrier = equation.params.get("differentiated", False)
                given = self._new(operands) if is_barrier else operands
                return self._of_jaxpr(bodies[0].jaxpr, bodies[0].arguments(given), runs)
            if name == "shard_map":
                return self._of_shard_map(equation, bodies[0], operands, runs)
        for body in bodies if name in CONTROL_FLOW else ():  # Kernels communicate by themselves.
            self._of_jaxpr(body.jaxpr, self._new(body.jaxpr.invars), runs * body.runs)
        if bodies or not is_pure(equation):
            return self._new(equation.outvars)
        key = name, self._of_params(equation), *operands
        if key not in self._first:
            self._first[key] = equation, self._new(equation.outvars)
        elif self._selects(equation):
            self._found.append((equation, self._first[key][0], runs))
        return self._first[key][1]

    def _of_shard_map(
        self, equation: JaxprEqn, body: Body, operands: list[_Value], runs: int
    ) -> list[_Value]:
        """Parts of equal arrays by equal specs are equal, and so are wholes of equal parts."""
        params = equation.params
        mesh = str(params["mesh"])
        parts = [
            ("part", mesh, str(spec), value)
            for spec, value in zip(params["in_specs"], operands, strict=True)
        ]
        results = self._of_jaxpr(body.jaxpr, body.arguments(parts), runs)
        return [
            _whole(mesh, str(spec), value)
            for spec, value in zip(params["out_specs"], results, strict=True)
        ]

    def _of_params(self, equation: JaxprEqn) -> tuple:
        return tuple((key, self._hashed(value)) for key, value in equation.params.items())

    def _hashed(self, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            self._kept_alive.append(value)
            return id(value)
        return value

    def _new(self, like: Sequence[Any]) -> list[_Value]:
        return [next(self._numbers) for _ in like]


def _whole(mesh: str, spec: str, value: _Value) -> _Value:
    """The array of which all devices have parts; what was divided so is what it was."""
    if isinstance(value, tuple) and value[:3] == ("part", mesh, spec):
        return value[3]
    return "whole", mesh, spec, value
