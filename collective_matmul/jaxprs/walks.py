"""Walks over the equations of a jaxpr, in the order of the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from collective_matmul.jaxprs.bodies import bodies_of, jaxprs_of

_T = TypeVar("_T")


class Scope(Generic[_T]):
    """The variables of a jaxpr and what they stand for: arrays, numbers, or anything else.

    Attributes:
      values: what each variable stands for, as far as the walk has come.

    Args:
      jaxpr: the jaxpr.
      arguments: what its arguments stand for.
      outside: returns what a literal or a constant stands for; asked at each use of a literal.
    """

    def __init__(self, jaxpr: Jaxpr, arguments: Iterable[_T], outside: Callable[[Any], _T]):
        self.jaxpr = jaxpr
        self._outside = outside
        self.values: dict[Any, _T] = {var: outside(var) for var in jaxpr.constvars}
        self.values.update(zip(jaxpr.invars, arguments, strict=True))

    def run(self, execute: Callable[[JaxprEqn, list[_T]], Iterable[_T]]) -> list[_T]:
        """Executes the equations, and returns what the results stand for.

        Args:
          execute: returns what the results of an equation stand for, given the same of its
            operands.
        """
        for equation in self.jaxpr.eqns:
            made = execute(equation, self._of(equation.invars))
            self.values.update(zip(equation.outvars, made, strict=True))
        return self._of(self.jaxpr.outvars)

    def _of(self, atoms: Sequence[Any]) -> list[_T]:
        return [self._outside(a) if isinstance(a, Literal) else self.values[a] for a in atoms]


def all_equations(*jaxprs: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of jaxprs at any depth, each before those that it executes."""
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            yield equation
            yield from all_equations(*jaxprs_of(equation))


def counted_equations(equation: JaxprEqn, runs: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yields the equations that one executes, at any depth, each with its number of runs.

    Branches count as taken, and a loop whose number of steps is computed counts one step.

    Args:
      equation: the equation.
      runs: the number of its own runs.
    """
    for body in bodies_of(equation):
        for inner in body.jaxpr.eqns:
            yield inner, runs * body.runs
            yield from counted_equations(inner, runs * body.runs)


def distinct_equations(*jaxprs: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields `all_equations`, but those of a jaxpr that several equations execute only once."""
    seen: set[Jaxpr] = set()

    def walk(jaxprs: Iterable[Jaxpr]) -> Iterator[JaxprEqn]:
        for jaxpr in jaxprs:
            if jaxpr not in seen:
                seen.add(jaxpr)
                for equation in jaxpr.eqns:
                    yield equation
                    yield from walk(jaxprs_of(equation))

    yield from walk(jaxprs)


class ByIdentity(Generic[_T]):
    """Results by objects, made once. Keeps the objects, so that no other gets the id of one."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Any, _T]] = {}

    def get(self, source: Any, key: Hashable, make: Callable[[], _T]) -> _T:
        """The result for an object and a key, of `make` if there is none yet."""
        at = id(source), key
        if at not in self._made:
            self._made[at] = source, make()
        return self._made[at][1]


class Holds:
    """Whether a jaxpr has an equation of some kind, at any depth. Looks at each jaxpr once.

    Args:
      is_one: whether an equation is of the kind.
    """

    def __init__(self, is_one: Callable[[JaxprEqn], Any]):
        self._is_one = is_one
        self._answers: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()

    def __call__(self, jaxpr: Jaxpr) -> bool:
        """Whether the jaxpr has one."""
        if jaxpr not in self._answers:
            self._answers[jaxpr] = any(
                self._is_one(equation) or any(map(self, jaxprs_of(equation)))
                for equation in jaxpr.eqns
            )
        return self._answers[jaxpr]
