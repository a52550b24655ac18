"""Counts how often a traced program runs each op.

An op is traced once where a loop repeats it or calls of one jitted function share it, and traced
again where it is differentiated. So decisions are not runs. While runs are counted, the equations
of every op have a name scope with the numbers of its decision and of the trace. The program is then
walked, with the lengths of its loops.

`overlap_jit` looks at programs in this way too, before it compiles them. What JAX has traced before
and takes from its caches has numbers from then, so they are of the whole process.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.dispatch.contract import Backend
from collective_matmul.dispatch.recording import Decision
from collective_matmul.jaxprs.bodies import PROGRAMS, bodies_of, executes_jaxprs
from collective_matmul.jaxprs.graph import is_pure
from collective_matmul.jaxprs.walks import Holds
from collective_matmul.peer_access import peer_kernels_undecided

_SCOPE = "collective_matmul.decision"
#: How names of primitives begin that multiply, alone or in a kernel of another library.
_PRODUCTS = ("dot_general", "ragged_dot_general", "dot_product_attention", "ffi_call")
_NUMBERS = re.compile(rf"{re.escape(_SCOPE)}(\d+)_(\d+)")


def _is_work(equation: JaxprEqn) -> bool:
    """Whether an equation is what an op is for: a product, a kernel, or an effect on memory."""
    name = equation.primitive.name
    is_kernel = name not in PROGRAMS and executes_jaxprs(equation)
    return name.startswith(_PRODUCTS) or is_kernel or not is_pure(equation)


_holds_work = Holds(_is_work)


def is_numbered(equation: JaxprEqn) -> bool:
    """Whether an op traced the equation while runs were counted."""
    return _SCOPE in str(equation.source_info.name_stack)


class RunCounter:
    """Numbers decisions while a program is traced, and counts their runs in it.

    Attributes:
      decisions: the decisions by number.
    """

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        self._numbers: dict[str, int] = {}
        self._traces = itertools.count()

    def number_of(self, decision: Decision) -> int:
        """The number of a decision. Decisions that look the same have the same number."""
        number = self._numbers.setdefault(repr(decision), len(self._numbers))
        self.decisions.setdefault(number, decision)
        return number

    def scope_of(self, decision: Decision) -> str:
        """The name scope of an op that is traced now."""
        return f"{_SCOPE}{self.number_of(decision)}_{next(self._traces)}"

    def runs(self, program: Jaxpr) -> Counter[int]:
        """How often a program runs each op, by the number of its decision.

        A branch counts as taken; a loop whose number of steps is computed counts one step.
        """
        return totals(program, lambda number: {number: 1}, lambda _: {})


def totals(
    program: Jaxpr,
    of_op: Callable[[int], Mapping[Any, Any]],
    of_equation: Callable[[JaxprEqn], Mapping[Any, Any]],
    of_branches: Callable[[Iterable[Counter]], Counter] = lambda parts: sum(parts, Counter()),
) -> Counter:
    """Sums over all ops and equations that a program runs, with the lengths of its loops.

    A loop whose number of steps is computed counts one step.

    Args:
      program: the program, traced while runs were counted.
      of_op: summands of each run of an op, by the number of its decision.
      of_equation: summands of an equation; not asked within ops.
      of_branches: the sums of a branch, from those of all alternatives; they are added if omitted.
    """
    # Shared jaxprs are counted once. Kept alive, so that no other object gets the id of one.
    counted: dict[tuple, tuple[Jaxpr, Counter]] = {}

    def count(jaxpr: Jaxpr, around: frozenset[tuple[str, str]]) -> Counter:
        place = id(jaxpr), around
        if place not in counted:
            counted[place] = jaxpr, counts_in(jaxpr, around)
        return counted[place][1]

    def counts_in(jaxpr: Jaxpr, around: frozenset[tuple[str, str]]) -> Counter:
        counts: Counter = Counter()
        found: set[tuple[str, str]] = set()
        for equation in jaxpr.eqns:
            bodies = bodies_of(equation)
            own = {} if around else of_equation(equation)
            works = _is_work(equation) or any(_holds_work(body.jaxpr) for body in bodies)
            if not (own or bodies or works):
                continue
            numbers = frozenset(_NUMBERS.findall(str(equation.source_info.name_stack)))
            # Where a backward pass computes an op again, only a part that prepares an operand, or
            # columns of an adapter that travel beside it, may be needed.
            if works:
                found |= numbers - around
            if not numbers:
                counts.update(own)
            parts = [count(body.jaxpr, around | numbers) for body in bodies]
            run = of_branches(parts) if equation.primitive.name == "cond" else sum(parts, Counter())
            for key, number in run.items():
                counts[key] += bodies[0].runs * number
        for number, _ in found:
            counts.update(of_op(int(number)))
        return counts

    return count(program, frozenset())


class _Scoped:
    """A backend whose equations are in a name scope."""

    def __init__(self, backend: Backend, scope: str):
        self._backend = backend
        self._scope = scope

    @property
    def __class__(self) -> type:  # Protocols look for methods in the class.
        return type(self._backend)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        return jax.named_scope(self._scope)(attribute) if callable(attribute) else attribute


#: Numbers the decisions for programs about which `overlap_jit` decides.
PROCESS_COUNTER = RunCounter()

_counting: contextvars.ContextVar[RunCounter | None] = contextvars.ContextVar(
    "counting", default=None
)


@contextlib.contextmanager
def count_runs(counter: RunCounter | None = None) -> Iterator[RunCounter]:
    """Numbers the decisions that are taken inside the block, by a new counter if none is given."""
    counter = counter or RunCounter()
    token = _counting.set(counter)
    try:
        yield counter
    finally:
        _counting.reset(token)


def numbered(decision: Decision, backend: Backend) -> Backend:
    """The backend of a decision; while runs are counted, its equations have the number of that."""
    counter = _counting.get()
    if counter is None:
        # Where no time is known, there is nothing to decide from, and scopes would be noise.
        if not peer_kernels_undecided() or decision.reference_seconds is None:
            return backend
        counter = PROCESS_COUNTER
    proxy: Any = _Scoped(backend, counter.scope_of(decision))
    return proxy
