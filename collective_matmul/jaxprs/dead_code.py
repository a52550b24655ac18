"""Programs without what computes nothing that they return, which XLA does not execute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from collective_matmul.jaxprs.bodies import PROGRAMS, bodies_of, opened, with_jaxprs
from collective_matmul.jaxprs.walks import ByIdentity

_BARRIER = "optimization_barrier"


def without_dead_code(program: Jaxpr) -> Jaxpr:
    """The program with the same arguments and results, and only the equations that these need.

    Gradients of weights in a block that is computed again leave others. Within the calls, loops and
    shard_maps of a program they are left out too. An operand of a barrier whose result nothing
    needs is no reason to compute it, as for XLA.
    """
    barriers = _Barriers()
    parts = barriers.split(program)
    live, _ = dce_jaxpr(parts, [True] * len(parts.outvars), instantiate=True)
    return barriers.joined(live)


class _Barriers:
    """Barriers of a program, each divided into one for each operand and made whole again."""

    def __init__(self) -> None:
        #: By the id of a part: the part, which is kept alive, and the barrier that it is of.
        self._whole: dict[int, tuple[JaxprEqn, JaxprEqn]] = {}

    def split(self, program: Jaxpr) -> Jaxpr:
        """The program with a barrier for each operand of its barriers, at any depth."""

        def parts_of(equation: JaxprEqn) -> Iterator[JaxprEqn]:
            if equation.primitive.name != _BARRIER or len(equation.invars) == 1:
                yield equation
                return
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                part = equation.replace(invars=[operand], outvars=[result])
                self._whole[id(part)] = part, equation
                yield part

        return _rebuilt(program, lambda eqns: [*itertools.chain(*map(parts_of, eqns))])

    def joined(self, program: Jaxpr) -> Jaxpr:
        """The program with the parts of each barrier that are left, one after the other, as one."""

        def barrier_of(equation: JaxprEqn) -> int:
            return id(self._whole.get(id(equation), (None, equation))[1])

        def join(equations: list[JaxprEqn]) -> list[JaxprEqn]:
            groups = [[*group] for _, group in itertools.groupby(equations, barrier_of)]
            return [
                first.replace(
                    invars=[operand for part in (first, *others) for operand in part.invars],
                    outvars=[result for part in (first, *others) for result in part.outvars],
                )
                if others
                else first
                for first, *others in groups
            ]

        return _rebuilt(program, join)


def _rebuilt(program: Jaxpr, change: Callable[[list[JaxprEqn]], list[JaxprEqn]]) -> Jaxpr:
    """The program with other equations in it and in all that it calls; not in kernels."""
    made = ByIdentity[Jaxpr]()

    def inside(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name not in PROGRAMS:
            return equation
        return with_jaxprs(equation, [rebuilt_value(body.value) for body in bodies_of(equation)])

    def rebuilt_value(value: Any) -> Any:
        jaxpr = opened(value)
        new = rebuilt(jaxpr)
        if new is jaxpr:
            return value
        return new if value is jaxpr else value.replace(jaxpr=new)

    def rebuilt(jaxpr: Jaxpr) -> Jaxpr:
        def make() -> Jaxpr:
            equations = change([*map(inside, jaxpr.eqns)])
            is_same = [*map(id, equations)] == [*map(id, jaxpr.eqns)]
            return jaxpr if is_same else jaxpr.replace(eqns=equations)

        return made.get(jaxpr, None, make)

    return rebuilt(program)
