"""Recognizes attention over keys and values that a program gathers, to name `context_attention`.

A sequence is divided, and each device gathers all keys and values before an attention of its own
queries: by a kernel, or by two products of matrices with a softmax between them. An op in place of
it would need to know which tokens a device has, on which the mask depends; the equations show
positions, if at all, as numbers that are computed. The products alone are sites as any other: a
ring hides such a gather, but all scores of a device are in memory at one time.
"""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.walks import all_equations
from collective_matmul.rewrite.find.collective_equations import kind_of
from collective_matmul.rewrite.find.flow import Flow, NumberedEquation, identity_of
from collective_matmul.rewrite.find.report import described, is_ours

#: Names of primitives of attention in one call, which differ by pass and number format.
_KERNELS = ("dot_product_attention_fwd", "dot_product_attention_fp8_fwd")
_ADVICE = (
    "collective_matmul.context_attention, which is told the layout of the sequence, attends while"
    " keys and values travel"
)


class AttentionBlocks:
    """The gathers of keys and values in hand-written attention over a divided sequence."""

    def __init__(self) -> None:
        # With the source: it is an object of its own for each collective that a program calls.
        self._remarks: dict[tuple, tuple[object, str]] = {}

    def look_into(self, jaxpr: Jaxpr) -> None:
        """Finds the attentions of a jaxpr."""
        if not any(map(_attends, all_equations(jaxpr))):
            return
        flow = Flow(jaxpr)
        gathers = [s for s in flow.steps if kind_of(s.equation) == "all_gather" and _is_users(s)]
        rows = [flow.reached(gather.results, _keeps_rows) for gather in gathers]
        for gather, keys in zip(gathers, rows, strict=True):
            for other, values in zip(gathers, rows, strict=True):
                attention = _attention_of(flow, keys, values)
                if attention is not None:
                    self._add(gather, "keys", attention)
                    self._add(other, "values", attention)
        for body in flow.bodies:
            self.look_into(body)

    def remark(self, equation: JaxprEqn) -> str | None:
        """The role of a gather in an attention, and what to call; None for any other collective."""
        _, remark = self._remarks.get(identity_of(equation), (None, None))
        return remark

    def _add(self, gather: NumberedEquation, what: str, attention: NumberedEquation) -> None:
        remark = f"it gathers {what} for attention, {described(attention.equation)}; {_ADVICE}"
        source = gather.equation.source_info.traceback
        self._remarks.setdefault(identity_of(gather.equation), (source, remark))


def _attention_of(
    flow: Flow, keys: dict[int, None], values: dict[int, None]
) -> NumberedEquation | None:
    """The kernel that takes both, or the product of queries with keys; None without attention."""
    for step in flow.steps:
        if step.name.startswith(_KERNELS):
            if step.operands[1] in keys and step.operands[2] in values:
                return step
        elif _is_batched_product(step) and not keys.keys().isdisjoint(step.operands):
            scores = flow.reached(step.results, lambda other, _: not _multiplies(other))
            weights = flow.reached(
                (r for n in scores for s in flow.users[n] if s.name == "exp" for r in s.results),
                lambda other, _: not _multiplies(other),
            )
            products = (s for n in weights for s in flow.users[n] if _is_batched_product(s))
            if any(
                any(n in weights for n in product.operands)
                and any(n in values and n not in weights for n in product.operands)
                for product in products
            ):
                return step
    return None


def _keeps_rows(step: NumberedEquation, number: int) -> bool:
    return number in step.rows and step.name != "dot_general"


def _is_batched_product(step: NumberedEquation) -> bool:
    """Whether it multiplies matrices of each sequence and head, unlike activations and a weight."""
    return step.name == "dot_general" and step.combines_rows


def _multiplies(step: NumberedEquation) -> bool:
    return step.communicates or step.name == "dot_general"


def _is_users(step: NumberedEquation) -> bool:
    return len(step.operands) == 1 and not is_ours(step.equation)


def _attends(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "exp" or equation.primitive.name.startswith(_KERNELS)
