"""The dataflow of a program through calls and loops, for recognizing hand-written blocks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.bodies import CALLS, bodies_of
from collective_matmul.jaxprs.graph import Atom, type_of
from collective_matmul.jaxprs.walks import Scope

#: Primitives whose results have rows, or sums of rows, of the operands at these positions.
_ROWS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gather", "dynamic_slice"), (0,)),
    **dict.fromkeys(("scatter", "scatter-add"), (0, 2)),
    "select_n": (1, 2),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys(("mul", "div"), (0, 1)),
    **dict.fromkeys(("convert_element_type", "copy", "copy_p", "name", "neg", "pvary"), (0,)),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"), (0,)),
    **dict.fromkeys(
        ("pad", "slice", "split", "unstack", "rev", "reduce_sum", "sharding_constraint"), (0,)
    ),
}
#: A loop is followed once.
_FOLLOWED = CALLS | {"scan"}


@dataclass(frozen=True)
class NumberedEquation:
    """An equation, with numbers for its operands and results that are the same inside calls."""

    equation: JaxprEqn
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def communicates(self) -> bool:
        """Whether devices exchange arrays."""
        return any(type(each).__name__ == "NamedAxisEffect" for each in self.equation.effects)

    @property
    def combines_rows(self) -> bool:
        """Whether it is a product of dimensions that both operands have, as of rows and weights."""
        return self.name == "dot_general" and any(self.equation.params["dimension_numbers"][1])

    @property
    def rows(self) -> tuple[int, ...]:
        """The operands whose rows the results have."""
        if self.combines_rows or self.name == "optimization_barrier":
            return self.operands
        places = _ROWS.get(self.name, ())
        return tuple(self.operands[place] for place in places if place < len(self.operands))

    def takes_as_factors(self, number: int) -> bool:
        """Whether it multiplies an operand with a larger one, or repeats it to that end."""
        sizes = [type_of(atom).shape for atom in self.equation.invars]
        place = self.operands.index(number)
        if self.name == "mul" or self.combines_rows:
            return math.prod(sizes[place]) < math.prod(sizes[1 - place])
        before, after = sizes[place], type_of(self.equation.outvars[0]).shape
        repeats = self.name == "broadcast_in_dim" and math.prod(before) < math.prod(after)
        return repeats and before[-1:] != after[-1:]


class Flow:
    """The dataflow of a jaxpr and of the calls in it.

    Attributes:
      steps: its equations, those of calls and loops in their place.
      users: for each number, the steps that read it.
      makers: for each number, the step that makes it.
      bodies: jaxprs of branches and others, which are flows of their own.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.steps: list[NumberedEquation] = []
        self.users: dict[int, list[NumberedEquation]] = defaultdict(list)
        self.makers: dict[int, NumberedEquation] = {}
        self.bodies: list[Jaxpr] = []
        self._numbers = itertools.count()
        self._add(jaxpr, [self._new(var) for var in jaxpr.invars])

    def _add(self, jaxpr: Jaxpr, arguments: Sequence[int]) -> list[int]:
        """Adds the equations of a jaxpr. Returns the numbers of its results."""
        return Scope(jaxpr, arguments, self._new).run(self._add_equation)

    def _add_equation(self, equation: JaxprEqn, operands: Sequence[int]) -> Sequence[int]:
        bodies = bodies_of(equation)
        if equation.primitive.name in _FOLLOWED and bodies[0].operands is not None:
            return self._add(bodies[0].jaxpr, bodies[0].arguments(operands))
        self.bodies += (body.jaxpr for body in bodies)
        results = tuple(map(self._new, equation.outvars))
        step = NumberedEquation(equation, tuple(operands), results)
        self.steps.append(step)
        self.makers.update(dict.fromkeys(results, step))
        for operand in dict.fromkeys(operands):
            self.users[operand].append(step)
        return results

    def _new(self, _: Atom) -> int:
        return next(self._numbers)

    def reached(
        self, starts: Iterable[int], follows: Callable[[NumberedEquation, int], bool]
    ) -> dict[int, None]:
        """Numbers of all arrays that are made of the first ones, by the steps that it follows."""
        found = dict.fromkeys(starts)
        pending = list(found)
        while pending:
            number = pending.pop()
            for step in self.users[number]:
                if follows(step, number):
                    new = [result for result in step.results if result not in found]
                    found.update(dict.fromkeys(new))
                    pending += new
        return found

    def rows_of(self, starts: Iterable[int]) -> dict[int, None]:
        """Numbers of all arrays that have rows of the first ones, or sums of these."""
        return self.reached(starts, lambda step, number: number in step.rows)


def identity_of(equation: JaxprEqn) -> tuple:
    """Equal for the same collective before and after calls around it are inlined."""
    operand = type_of(equation.invars[0])
    source = id(equation.source_info.traceback)
    return equation.primitive.name, source, operand.shape, operand.dtype
