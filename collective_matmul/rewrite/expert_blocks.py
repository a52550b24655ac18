"""Recognizes hand-written blocks of experts, to say why `overlap` leaves their collectives alone.

Such a block gathers tokens and what a router decided about them, copies a row for each pair of a
token and an expert, multiplies groups of rows by `lax.ragged_dot`, and scatters the sums. An op in
its place would be right only if each row returns to its token, which the equations do not show in
general. `expert_mlp` has the whole block.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from collective_matmul.rewrite.collective_equations import kind_of
from collective_matmul.rewrite.divergence import CALLS
from collective_matmul.rewrite.graph import Atom, type_of
from collective_matmul.rewrite.report import described, is_ours

_GROUPED = "ragged_dot_general"
_ADVICE = (
    "overlap cannot prove that each row returns to its token: write the whole block as"
    " collective_matmul.expert_mlp or layers.ExpertMLP"
)
_WEIGHTS_ADVICE = (
    "collective_matmul.expert_mlp and layers.ExpertMLP take shards of weights (weight_axis_name)"
)

#: Primitives whose results have rows, or sums of rows, of the operands at these positions.
_ROWS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gather", "dynamic_slice"), (0,)),
    **dict.fromkeys(("scatter", "scatter-add"), (0, 2)),
    "select_n": (1, 2),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys(("mul", "div"), (0, 1)),
    **dict.fromkeys(("convert_element_type", "copy", "copy_p", "name", "neg", "pvary"), (0,)),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"), (0,)),
    **dict.fromkeys(("pad", "slice", "split", "rev", "reduce_sum", "sharding_constraint"), (0,)),
}
#: A loop is followed once.
_CALLS = CALLS | {"scan"}
#: Additions: of a shared expert, and of gradients; but also of a residual stream.
_ADDITIONS = ("add", "add_any", "sub", "concatenate")


@dataclass(frozen=True)
class _NumberedEquation:
    """An equation, with numbers for its operands and results that are the same inside calls."""

    equation: JaxprEqn
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

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


class _Flow:
    """The dataflow of a jaxpr and of the calls in it.

    Attributes:
      steps: its equations, those of calls and loops in their place.
      users: for each number, the steps that read it.
      makers: for each number, the step that makes it.
      bodies: jaxprs of branches and others, which are flows of their own.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.steps: list[_NumberedEquation] = []
        self.users: dict[int, list[_NumberedEquation]] = defaultdict(list)
        self.makers: dict[int, _NumberedEquation] = {}
        self.bodies: list[Jaxpr] = []
        self._numbers = itertools.count()
        self._add(jaxpr, {})
        self.products = [step for step in self.steps if _is_grouped(step.equation)]

    def _add(self, jaxpr: Jaxpr, numbers: dict[Var, int]) -> None:
        for equation in jaxpr.eqns:
            operands = tuple(self._number(atom, numbers) for atom in equation.invars)
            inner = list(jaxprs_in_params(equation.params))
            is_call = equation.primitive.name in _CALLS and len(inner) == 1
            if is_call and len(inner[0].invars) == len(operands):
                inside = dict(zip(inner[0].invars, operands, strict=True))
                self._add(inner[0], inside)
                results = (self._number(atom, inside) for atom in inner[0].outvars)
                numbers.update(zip(equation.outvars, results, strict=True))
                continue
            self.bodies += inner
            results = tuple(self._number(var, numbers) for var in equation.outvars)
            step = _NumberedEquation(equation, operands, results)
            self.steps.append(step)
            self.makers.update(dict.fromkeys(results, step))
            for operand in dict.fromkeys(operands):
                self.users[operand].append(step)

    def _number(self, atom: Atom, numbers: dict[Var, int]) -> int:
        if isinstance(atom, Literal):
            return next(self._numbers)
        return numbers.setdefault(atom, next(self._numbers))

    def reached(
        self, starts: Iterable[int], follows: Callable[[_NumberedEquation, int], bool]
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

    def behind(self, number: int, *, additions: bool) -> Iterator[_NumberedEquation]:
        """The grouped products and collectives whose rows an array has, or sums of these."""
        pending, seen = [number], {number}
        while pending:
            step = self.makers.get(pending.pop())
            if step is None:
                continue
            if _multiplies_or_communicates(step):
                yield step
            before = step.operands if additions and step.name in _ADDITIONS else step.rows
            new = [operand for operand in before if operand not in seen]
            seen.update(new)
            pending += new


class ExpertBlocks:
    """The parts of collectives in hand-written blocks of experts."""

    def __init__(self) -> None:
        # With the source: it is an object of its own for each collective that a program calls.
        self._reasons: dict[tuple, tuple[object, str]] = {}

    def look_into(self, jaxpr: Jaxpr) -> None:
        """Finds the blocks of a jaxpr. What was found from outside of it stays: that saw more."""
        if not _holds_grouped(jaxpr):
            return
        flow = _Flow(jaxpr)
        for step in flow.steps:
            kind = kind_of(step.equation)
            if kind is None or len(step.operands) != 1:
                continue
            reason = (_reason_of_gather if kind == "all_gather" else _reason_of_sum)(flow, step)
            if reason is not None:
                source = step.equation.source_info.traceback
                self._reasons.setdefault(_key(step.equation), (source, reason))
        for body in flow.bodies:
            self.look_into(body)

    def reason(self, equation: JaxprEqn) -> str | None:
        """Why `overlap` leaves a collective of such a block alone; None for any other."""
        _, reason = self._reasons.get(_key(equation), (None, None))
        return reason


def _reason_of_gather(flow: _Flow, gather: _NumberedEquation) -> str | None:
    rows = flow.reached(
        gather.results,
        lambda step, number: number in step.rows and not step.takes_as_factors(number),
    )
    if product := _product_of_rows(flow, rows):
        return f"its rows are tokens, to which {_at(product)} applies experts; {_ADVICE}"
    for product in flow.products:
        if product.operands[1] in rows:
            return f"it gathers weights of experts for {_at(product)}; {_WEIGHTS_ADVICE}"
    decided = flow.reached(gather.results, lambda step, _: not _multiplies_or_communicates(step))
    for product in flow.products:
        if product.operands[2] in decided:
            return f"it decides which expert {_at(product)} applies to a token; {_ADVICE}"
    for number in rows:
        for step in flow.users[number]:
            if step.takes_as_factors(number) and (product := _product_beside(flow, step)):
                return f"it gathers the factors of results of {_at(product)}; {_ADVICE}"
    return None


def _product_beside(flow: _Flow, scaled: _NumberedEquation) -> _NumberedEquation | None:
    """The first grouped product that scaled rows come from or go to, if there is one."""
    after = flow.reached(scaled.results, lambda step, number: number in step.rows)
    if product := _product_of_rows(flow, after):
        return product
    behind = (step for number in after for step in flow.behind(number, additions=False))
    return next((step for step in behind if _is_grouped(step.equation)), None)


def _product_of_rows(flow: _Flow, rows: Collection[int]) -> _NumberedEquation | None:
    """The first grouped product that multiplies rows of tokens, if there is one."""
    for product in flow.products:
        taken = product.operands[:2] if _makes_weights(product) else product.operands[:1]
        if any(operand in rows for operand in taken):
            return product
    return None


def _reason_of_sum(flow: _Flow, summed: _NumberedEquation) -> str | None:
    operand = type_of(summed.equation.invars[0])
    scatters = kind_of(summed.equation) == "reduce_scatter"
    if operand.ndim < 2:
        return None
    for step in flow.behind(summed.operands[0], additions=False):
        if _is_grouped(step.equation) and not _makes_weights(step):
            return f"it adds up what {_at(step)} makes of tokens; {_ADVICE}"
        if _is_grouped(step.equation):
            advice = _WEIGHTS_ADVICE if scatters else "overlap takes sums of plain matmuls"
            return f"it adds up gradients of experts' weights, of {_at(step)}; {advice}"
        if kind_of(step.equation) == "all_gather" and scatters:
            rows = flow.reached(step.results, lambda step, number: number in step.rows)
            if product := _product_of_rows(flow, rows):
                return f"it adds up products of tokens of {_at(product)}; {_ADVICE}"
    tokens = math.prod(operand.shape[:-1])
    for step in flow.behind(summed.operands[0], additions=scatters):
        if _is_grouped(step.equation) and not _makes_weights(step):
            # Not where a residual stream leads from other arrays to the experts.
            rows = type_of(step.equation.invars[0]).shape[0]
            if tokens and rows % tokens == 0:
                return f"it adds up what {_at(step)} makes of tokens; {_ADVICE}"
    return None


def _multiplies_or_communicates(step: _NumberedEquation) -> bool:
    is_collective = any(type(each).__name__ == "NamedAxisEffect" for each in step.equation.effects)
    return is_collective or step.name in ("dot_general", _GROUPED)


def _makes_weights(product: _NumberedEquation) -> bool:
    """Whether the grouped product contracts the rows, as weight gradients do."""
    numbers = product.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted)


def _is_grouped(equation: JaxprEqn) -> bool:
    return equation.primitive.name == _GROUPED and not is_ours(equation)


def _holds_grouped(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name == _GROUPED
        or any(map(_holds_grouped, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _at(product: _NumberedEquation) -> str:
    return described(product.equation)


def _key(equation: JaxprEqn) -> tuple:
    """Equal for the same collective before and after calls around it are inlined."""
    operand = type_of(equation.invars[0])
    source = id(equation.source_info.traceback)
    return equation.primitive.name, source, operand.shape, operand.dtype
