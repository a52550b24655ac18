"""Labels that flow from the arguments of a program to its results, through calls and control flow.

Each value has a set of labels, such as the mesh axes over which it varies. Sets only grow: a value
that is one of several has the union of theirs. So a loop is followed in a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.bodies import bodies_of, opened
from collective_matmul.jaxprs.walks import ByIdentity, Scope

Labels = frozenset[Any]
NOTHING: Labels = frozenset()


class Propagation:
    """Follows labels through jaxprs. A subclass says what equations do with them.

    Attributes:
      entered: names of the calls, loops and branches whose jaxprs are followed.
      reads_initial: whether results of a loop have the labels of what it starts with, even if it
        has at least one step, which replaces that.
    """

    entered: frozenset[str] = frozenset()
    reads_initial = False

    def __init__(self) -> None:
        self._results = ByIdentity[list[Labels]]()

    def of_equation(self, equation: JaxprEqn, operands: Sequence[Labels]) -> Sequence[Labels]:
        """The labels of each result of an equation whose jaxprs are not followed.

        Unless a subclass says otherwise, each result has the labels of all operands.
        """
        return [NOTHING.union(*operands)] * len(equation.outvars)

    def variables(self, jaxpr: Jaxpr, given: Mapping[Any, Labels]) -> dict[Any, Labels]:
        """The labels of each variable of a jaxpr, from those of its arguments and constants.

        Those that are not given have none.
        """
        return self._walked(jaxpr, given)[0].values

    def inside(self, equation: JaxprEqn, operands: Sequence[Labels]) -> tuple[list[Labels], Labels]:
        """The labels of the operands of a call, loop or branch in any step, and of its predicate.

        Pass the first to `Body.arguments` for those inside.
        """
        bodies = bodies_of(equation)
        labels = list(operands)
        predicate = labels[0] if equation.primitive.name == "cond" else NOTHING
        while any(body.carried or body.steps is None for body in bodies):
            grown = list(labels)
            for body in bodies:
                results = self._returned(body.value, body.arguments(labels))
                if not body.results:  # The condition, which comes first.
                    predicate = predicate.union(*results)
                for result, operand in body.carried:
                    grown[operand] |= results[result] | predicate
            if grown == labels:
                break
            labels = grown
        return labels, predicate

    def _executed(self, equation: JaxprEqn, operands: Sequence[Labels]) -> Sequence[Labels]:
        bodies = bodies_of(equation) if equation.primitive.name in self.entered else []
        if not bodies or any(body.operands is None for body in bodies):
            return self.of_equation(equation, operands)
        labels, predicate = self.inside(equation, operands)
        made = [predicate] * len(equation.outvars)
        for body in bodies:
            if body.results:
                results = self._returned(body.value, body.arguments(labels))
                for result, own in zip(body.results, results, strict=True):
                    made[result] |= own
            if self.reads_initial or not body.steps:
                for result, operand in body.carried:
                    made[body.results[result]] |= labels[operand]
        return made

    def _returned(self, program: Any, arguments: Sequence[Labels]) -> list[Labels]:
        """The labels of each result of a jaxpr, from those of its arguments."""
        jaxpr = opened(program)

        def results() -> list[Labels]:
            return self._walked(jaxpr, dict(zip(jaxpr.invars, arguments, strict=True)))[1]

        return self._results.get(jaxpr, tuple(arguments), results)

    def _walked(self, jaxpr: Jaxpr, given: Mapping[Any, Labels]) -> tuple[Scope, list[Labels]]:
        scope = Scope(jaxpr, [NOTHING] * len(jaxpr.invars), lambda _: NOTHING)
        scope.values.update(given)
        return scope, scope.run(self._executed)
