"""Recognizes hand-written blocks of experts, to say why `overlap` leaves their collectives alone.

Such a block gathers tokens and what a router decided about them, copies a row for each pair of a
token and an expert, multiplies groups of rows by `lax.ragged_dot`, and scatters the sums. An op in
its place would be right only if each row returns to its token, which the equations do not show in
general. `expert_mlp` has the whole block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.graph import type_of
from collective_matmul.jaxprs.walks import Holds
from collective_matmul.rewrite.find.collective_equations import kind_of
from collective_matmul.rewrite.find.flow import Flow, NumberedEquation, identity_of
from collective_matmul.rewrite.find.report import described, is_ours

_GROUPED = "ragged_dot_general"
_holds_grouped = Holds(lambda equation: equation.primitive.name == _GROUPED)
_ADVICE = (
    "overlap cannot prove that each row returns to its token: write the whole block as"
    " collective_matmul.expert_mlp or layers.ExpertMLP"
)
_WEIGHTS_ADVICE = (
    "collective_matmul.expert_mlp and layers.ExpertMLP take shards of weights (weight_axis_name)"
)

#: Additions: of a shared expert, and of gradients; but also of a residual stream.
_ADDITIONS = ("add", "add_any", "sub", "concatenate")


class _ExpertFlow(Flow):
    """The dataflow of a jaxpr, and its grouped products."""

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(jaxpr)
        self.products = [step for step in self.steps if _is_grouped(step.equation)]

    def behind(self, number: int, *, additions: bool) -> Iterator[NumberedEquation]:
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
        flow = _ExpertFlow(jaxpr)
        for step in flow.steps:
            kind = kind_of(step.equation)
            if kind is None or len(step.operands) != 1:
                continue
            reason = (_reason_of_gather if kind == "all_gather" else _reason_of_sum)(flow, step)
            if reason is not None:
                source = step.equation.source_info.traceback
                self._reasons.setdefault(identity_of(step.equation), (source, reason))
        for body in flow.bodies:
            self.look_into(body)

    def reason(self, equation: JaxprEqn) -> str | None:
        """Why `overlap` leaves a collective of such a block alone; None for any other."""
        _, reason = self._reasons.get(identity_of(equation), (None, None))
        return reason


def _reason_of_gather(flow: _ExpertFlow, gather: NumberedEquation) -> str | None:
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


def _product_beside(flow: _ExpertFlow, scaled: NumberedEquation) -> NumberedEquation | None:
    """The first grouped product that scaled rows come from or go to, if there is one."""
    after = flow.rows_of(scaled.results)
    if product := _product_of_rows(flow, after):
        return product
    behind = (step for number in after for step in flow.behind(number, additions=False))
    return next((step for step in behind if _is_grouped(step.equation)), None)


def _product_of_rows(flow: _ExpertFlow, rows: Collection[int]) -> NumberedEquation | None:
    """The first grouped product that multiplies rows of tokens, if there is one."""
    for product in flow.products:
        taken = product.operands[:2] if _makes_weights(product) else product.operands[:1]
        if any(operand in rows for operand in taken):
            return product
    return None


def _reason_of_sum(flow: _ExpertFlow, summed: NumberedEquation) -> str | None:
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
            rows = flow.rows_of(step.results)
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


def _multiplies_or_communicates(step: NumberedEquation) -> bool:
    return step.communicates or step.name in ("dot_general", _GROUPED)


def _makes_weights(product: NumberedEquation) -> bool:
    """Whether the grouped product contracts the rows, as weight gradients do."""
    numbers = product.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted)


def _is_grouped(equation: JaxprEqn) -> bool:
    return equation.primitive.name == _GROUPED and not is_ours(equation)


def _at(product: NumberedEquation) -> str:
    return described(product.equation)
