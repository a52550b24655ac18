"""Recognizes hand-written blocks that have an op of their own, to name it in reports.

Blocks of experts gather tokens and what a router decided about them, copy a row for each pair of a
token and an expert, multiply groups of rows by `lax.ragged_dot`, and scatter the sums. An op in
their place would be right only if each row returns to its token, which the equations do not show in
general. `expert_mlp` has the whole block.

In attention over a divided sequence, each device gathers all keys and values before it attends to
them with its own queries: by a kernel, or by two products of matrices with a softmax between them.
An op in place of it would need to know which tokens a device has, on which the mask depends; the
equations show positions, if at all, as numbers that are computed. The products alone are sites as
any other: a ring hides such a gather, but all scores of a device are in memory at one time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.bodies import CALLS, bodies_of
from collective_matmul.jaxprs.graph import Atom, communicates, type_of
from collective_matmul.jaxprs.sources import described
from collective_matmul.jaxprs.walks import Holds, Scope
from collective_matmul.rewrite.find.report import is_ours
from collective_matmul.rewrite.find.supported_collectives import kind_of

_GROUPED = "ragged_dot_general"
#: Names of primitives of attention in one call, which differ by pass and number format.
_KERNELS = ("dot_product_attention_fwd", "dot_product_attention_fp8_fwd")
_EXPERT_ADVICE = (
    "overlap cannot prove that each row returns to its token: write the whole block as"
    " collective_matmul.expert_mlp or layers.ExpertMLP"
)
_WEIGHTS_ADVICE = (
    "collective_matmul.expert_mlp and layers.ExpertMLP take shards of weights (weight_axis_name)"
)
_ATTENTION_ADVICE = (
    "collective_matmul.context_attention, which is told the layout of the sequence, attends while"
    " keys and values travel"
)

#: Additions: of a shared expert, and of gradients; but also of a residual stream.
_ADDITIONS = ("add", "add_any", "sub", "concatenate")

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
        return communicates(self.equation)

    @property
    def multiplies(self) -> bool:
        """Whether rows of its results are others than those of its operands, or sums of these."""
        return self.communicates or self.name in ("dot_general", _GROUPED)

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
      products: its grouped products.
      bodies: jaxprs of branches and others, which are flows of their own.
      jaxprs: the jaxpr, and those of the calls and loops.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.steps: list[NumberedEquation] = []
        self.users: dict[int, list[NumberedEquation]] = defaultdict(list)
        self.makers: dict[int, NumberedEquation] = {}
        self.bodies: list[Jaxpr] = []
        self.jaxprs: list[Jaxpr] = []
        self._numbers = itertools.count()
        self._add(jaxpr, [self._new(var) for var in jaxpr.invars])
        self.products = [step for step in self.steps if _is_grouped(step.equation)]

    def _add(self, jaxpr: Jaxpr, arguments: Sequence[int]) -> list[int]:
        """Adds the equations of a jaxpr. Returns the numbers of its results."""
        self.jaxprs.append(jaxpr)
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

    def behind(self, number: int, *, additions: bool) -> Iterator[NumberedEquation]:
        """The grouped products and collectives whose rows an array has, or sums of these."""
        pending, seen = [number], {number}
        while pending:
            step = self.makers.get(pending.pop())
            if step is None:
                continue
            if step.multiplies:
                yield step
            before = step.operands if additions and step.name in _ADDITIONS else step.rows
            new = [operand for operand in before if operand not in seen]
            seen.update(new)
            pending += new


_holds_grouped = Holds(lambda equation: equation.primitive.name == _GROUPED)
_holds_attention = Holds(
    lambda e: e.primitive.name == "exp" or e.primitive.name.startswith(_KERNELS)
)


class WrittenBlocks:
    """The collectives of hand-written blocks, each with its part in the block."""

    def __init__(self) -> None:
        # With the source: it is an object of its own for each collective that a program calls.
        self._experts: dict[tuple, tuple[object, str]] = {}
        self._attention: dict[tuple, tuple[object, str]] = {}
        #: The jaxprs that were looked into, alone or as a part of another.
        self._known: set[Jaxpr] = set()

    def look_into(self, jaxpr: Jaxpr) -> None:
        """Finds the blocks of a jaxpr. What was found from outside of it stays: that saw more."""
        if jaxpr in self._known or not (_holds_grouped(jaxpr) or _holds_attention(jaxpr)):
            return
        flow = Flow(jaxpr)
        self._known.update(flow.jaxprs)
        for step, reason in _parts_of_experts(flow):
            self._experts.setdefault(_identity_of(step.equation), (_source(step), reason))
        for step, remark in _parts_of_attention(flow):
            self._attention.setdefault(_identity_of(step.equation), (_source(step), remark))
        for body in flow.bodies:
            self.look_into(body)

    def reason(self, equation: JaxprEqn) -> str | None:
        """The part of a collective in a block of experts, or else in attention; or None.

        `overlap` leaves a collective of experts alone for this reason.
        """
        _, reason = self._experts.get(_identity_of(equation), (None, None))
        return reason or self.remark(equation)

    def remark(self, equation: JaxprEqn) -> str | None:
        """The part of a gather in attention, and what to call; None for any other collective."""
        _, remark = self._attention.get(_identity_of(equation), (None, None))
        return remark


def _identity_of(equation: JaxprEqn) -> tuple:
    """Equal for the same collective before and after calls around it are inlined."""
    operand = type_of(equation.invars[0])
    source = id(equation.source_info.traceback)
    return equation.primitive.name, source, operand.shape, operand.dtype


def _source(step: NumberedEquation) -> object:
    return step.equation.source_info.traceback


def _parts_of_experts(flow: Flow) -> Iterator[tuple[NumberedEquation, str]]:
    """The collectives in blocks of experts, and why `overlap` leaves each alone."""
    for step in flow.steps if flow.products else ():
        kind = kind_of(step.equation)
        if kind is not None and len(step.operands) == 1:
            reason = (_reason_of_gather if kind == "all_gather" else _reason_of_sum)(flow, step)
            if reason is not None:
                yield step, reason


def _reason_of_gather(flow: Flow, gather: NumberedEquation) -> str | None:
    rows = flow.reached(
        gather.results,
        lambda step, number: number in step.rows and not step.takes_as_factors(number),
    )
    if product := _product_of_rows(flow, rows):
        return f"its rows are tokens, to which {_at(product)} applies experts; {_EXPERT_ADVICE}"
    for product in flow.products:
        if product.operands[1] in rows:
            return f"it gathers weights of experts for {_at(product)}; {_WEIGHTS_ADVICE}"
    decided = flow.reached(gather.results, lambda step, _: not step.multiplies)
    for product in flow.products:
        if product.operands[2] in decided:
            return f"it decides which expert {_at(product)} applies to a token; {_EXPERT_ADVICE}"
    for number in rows:
        for step in flow.users[number]:
            if step.takes_as_factors(number) and (product := _product_beside(flow, step)):
                return f"it gathers the factors of results of {_at(product)}; {_EXPERT_ADVICE}"
    return None


def _product_beside(flow: Flow, scaled: NumberedEquation) -> NumberedEquation | None:
    """The first grouped product that scaled rows come from or go to, if there is one."""
    after = flow.rows_of(scaled.results)
    if product := _product_of_rows(flow, after):
        return product
    behind = (step for number in after for step in flow.behind(number, additions=False))
    return next((step for step in behind if _is_grouped(step.equation)), None)


def _product_of_rows(flow: Flow, rows: Collection[int]) -> NumberedEquation | None:
    """The first grouped product that multiplies rows of tokens, if there is one."""
    for product in flow.products:
        taken = product.operands[:2] if _makes_weights(product) else product.operands[:1]
        if any(operand in rows for operand in taken):
            return product
    return None


def _reason_of_sum(flow: Flow, summed: NumberedEquation) -> str | None:
    operand = type_of(summed.equation.invars[0])
    scatters = kind_of(summed.equation) == "reduce_scatter"
    if operand.ndim < 2:
        return None
    for step in flow.behind(summed.operands[0], additions=False):
        if _is_grouped(step.equation) and not _makes_weights(step):
            return f"it adds up what {_at(step)} makes of tokens; {_EXPERT_ADVICE}"
        if _is_grouped(step.equation):
            advice = _WEIGHTS_ADVICE if scatters else "overlap takes sums of plain matmuls"
            return f"it adds up gradients of experts' weights, of {_at(step)}; {advice}"
        if kind_of(step.equation) == "all_gather" and scatters:
            rows = flow.rows_of(step.results)
            if product := _product_of_rows(flow, rows):
                return f"it adds up products of tokens of {_at(product)}; {_EXPERT_ADVICE}"
    tokens = math.prod(operand.shape[:-1])
    for step in flow.behind(summed.operands[0], additions=scatters):
        if _is_grouped(step.equation) and not _makes_weights(step):
            # Not where a residual stream leads from other arrays to the experts.
            rows = type_of(step.equation.invars[0]).shape[0]
            if tokens and rows % tokens == 0:
                return f"it adds up what {_at(step)} makes of tokens; {_EXPERT_ADVICE}"
    return None


def _makes_weights(product: NumberedEquation) -> bool:
    """Whether the grouped product contracts the rows, as weight gradients do."""
    numbers = product.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted)


def _is_grouped(equation: JaxprEqn) -> bool:
    return equation.primitive.name == _GROUPED and not is_ours(equation)


def _at(product: NumberedEquation) -> str:
    return described(product.equation)


def _parts_of_attention(flow: Flow) -> Iterator[tuple[NumberedEquation, str]]:
    """The gathers of keys and values for attention, and what to call instead."""
    #: The gathers whose rows an array has, by its number.
    gathers: dict[int, list[NumberedEquation]] = defaultdict(list)
    for step in flow.steps:
        if kind_of(step.equation) == "all_gather" and _is_users(step):
            for number in flow.reached(step.results, _keeps_rows):
                gathers[number].append(step)
    for step in flow.steps if gathers else ():
        keys, values = _operands_of_attention(flow, step, gathers)
        operands = {"keys": keys, "values": values}
        found = {w: [g for n in operands[w] for g in gathers.get(n, ())] for w in operands}
        if all(found.values()):
            for what, of_part in found.items():
                remark = f"it gathers {what} for attention, {_at(step)}; {_ATTENTION_ADVICE}"
                yield from ((gather, remark) for gather in of_part)


def _operands_of_attention(
    flow: Flow, step: NumberedEquation, gathered: Collection[int]
) -> tuple[Collection[int], Collection[int]]:
    """Numbers of the keys and values of an attention, by a kernel or the product of scores.

    None are found where no operand is gathered.
    """
    if step.name.startswith(_KERNELS):
        return step.operands[1:2], step.operands[2:3]
    if not _is_batched_product(step) or not any(n in gathered for n in step.operands):
        return (), ()
    scores = flow.reached(step.results, lambda other, _: not other.multiplies)
    weights = flow.reached(
        (r for n in scores for s in flow.users[n] if s.name == "exp" for r in s.results),
        lambda other, _: not other.multiplies,
    )
    products = (s for n in weights for s in flow.users[n] if _is_batched_product(s))
    values = (n for product in products for n in product.operands if n not in weights)
    return step.operands, dict.fromkeys(values)


def _keeps_rows(step: NumberedEquation, number: int) -> bool:
    return number in step.rows and step.name != "dot_general"


def _is_batched_product(step: NumberedEquation) -> bool:
    """Whether it multiplies matrices of each sequence and head, unlike activations and a weight."""
    return step.name == "dot_general" and step.combines_rows


def _is_users(step: NumberedEquation) -> bool:
    return len(step.operands) == 1 and not is_ours(step.equation)
