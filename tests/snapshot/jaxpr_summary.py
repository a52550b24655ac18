"""Contents of a jaxpr: how many equations of each primitive, and a digest of its dataflow.

Two jaxprs with equal digests compute their results from their arguments by the same equations, in
whatever order these stand, whatever the names of functions are, wherever a `jax.jit` or a
`jax.custom_vjp` begins and ends, and wherever arrays are typed as varying over a mesh axis.
Equations whose results nobody uses are counted, and not digested.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from tests.snapshot.library import without_addresses

BARRIER = "optimization_barrier"
COMMUNICATION = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "ppermute",
        "psum",
        "psum2",
        "psum_invariant",
        "reduce_scatter",
        "unreduced_reduce_scatter",
    }
)
# Equations that compute what their jaxpr does.
_TRANSPARENT = {
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "jit",
    "pjit",
}
# Equations that call a kernel.
_KERNEL_CALLS = {"core_map", "mpmd_map", "pallas_call"}
# Parameters that name things, or that are functions for transformations.
_NOT_DIGESTED = {"name", "debug_info", "fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "rule", "inline"}


def summary(closed: ClosedJaxpr) -> dict[str, Any]:
    """The summary of a jaxpr, as JSON values."""
    counts = _Counts()
    counts.add(closed.jaxpr)
    return {
        "primitives": dict(sorted(counts.primitives.items())),
        "primitives in kernels": dict(sorted(counts.in_kernels.items())),
        "barriers": sorted(counts.barriers.elements()),
        "communication": dict(sorted(counts.communication.items())),
        "dataflow": _Dataflow().of_program(closed),
    }


class _Counts:
    """Counts of the equations of a jaxpr, and of the jaxprs inside."""

    def __init__(self) -> None:
        self.primitives: Counter[str] = Counter()
        self.in_kernels: Counter[str] = Counter()
        self.barriers: Counter[int] = Counter()
        self.communication: Counter[str] = Counter()

    def add(self, jaxpr: Jaxpr, in_kernel: bool = False) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            (self.in_kernels if in_kernel else self.primitives)[name] += 1
            if name == BARRIER:
                self.barriers[len(equation.invars)] += 1
            elif name in COMMUNICATION:
                self.communication[_message(equation)] += 1
            for inner in jaxprs_in_params(equation.params):
                self.add(inner, in_kernel or name in _KERNEL_CALLS)


def _message(equation: JaxprEqn) -> str:
    """A collective: what it moves, over which axes, and between whom."""
    params = equation.params
    axes = params.get("axis_name", params.get("axes"))
    types = ", ".join(var.aval.str_short() for var in equation.invars)
    pairs = f" {sorted(params['perm'])}" if "perm" in params else ""
    return f"{equation.primitive.name} {types} over {axes}{pairs}"


class _Dataflow:
    """Digests of values: of an equation's results, from those of its operands.

    Digests of jaxprs that are called several times, such as kernels, are computed once.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def of_program(self, closed: ClosedJaxpr) -> str:
        arguments = [_digest("argument", i, v.aval) for i, v in enumerate(closed.jaxpr.invars)]
        return _digest(*self._results(closed.jaxpr, closed.consts, arguments))

    def _results(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[str]) -> list[str]:
        """The digests of a jaxpr's results, from those of its arguments."""
        known: dict[Any, str] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= zip(jaxpr.constvars, map(_constant, consts), strict=True)

        def of(var: Any) -> str:
            if isinstance(var, Literal):
                return _digest("literal", var.val, var.aval)
            return known[var]

        for equation in jaxpr.eqns:
            results = self._of_equation(equation, [of(var) for var in equation.invars])
            known |= zip(equation.outvars, results, strict=True)
        return [of(var) for var in jaxpr.outvars]

    def _of_equation(self, equation: JaxprEqn, operands: list[str]) -> list[str]:
        name, params = equation.primitive.name, equation.params
        if name == BARRIER:
            # Operands wait for each other in whatever order they are given.
            everything = sorted(operands)
            return [_digest(name, operand, *everything) for operand in operands]
        if name == "pvary":  # Changes types of arrays only.
            return operands
        inner = [*jaxprs_in_params(params)]
        if name in _TRANSPARENT and len(inner) == 1:
            return self._results(inner[0], _consts(params, inner[0]), operands)
        if name == "shard_map":
            others = self._params({k: v for k, v in params.items() if v is not inner[0]})
            entering = [_digest("enters", others, i, x) for i, x in enumerate(operands)]
            leaving = self._results(inner[0], _consts(params, inner[0]), entering)
            return [_digest("leaves", others, i, x) for i, x in enumerate(leaving)]
        whole = _digest(name, self._params(params), *operands)
        return [_digest(whole, i) for i in range(len(equation.outvars))]

    def _params(self, params: Mapping[str, Any]) -> str:
        parts = (
            f"{name}={self._text(value)}"
            for name, value in sorted(params.items())
            if name not in _NOT_DIGESTED
        )
        return ", ".join(parts)

    def _text(self, value: Any) -> str:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            if id(value) not in self._texts:
                self._texts[id(value)] = _jaxpr_text(value)
            return self._texts[id(value)]
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._text, value))})"
        return without_addresses(str(value))


def _jaxpr_text(jaxpr: Any) -> str:
    """A jaxpr as text, with its equations in their order, without names of functions."""
    text = without_addresses(str(jaxpr))
    text = re.sub(r"\b(name|name_and_src_info|debug_info|metadata)=[^\n]*", "", text)
    consts = map(_constant, getattr(jaxpr, "consts", ()))
    return _digest(text, *consts)


def _consts(params: Mapping[str, Any], jaxpr: Jaxpr) -> Sequence[Any]:
    """The constants of a jaxpr among parameters."""
    closed = (v for v in params.values() if isinstance(v, ClosedJaxpr) and v.jaxpr is jaxpr)
    return next((each.consts for each in closed), ())


def _constant(value: Any) -> str:
    try:
        array = np.asarray(value)
        return _digest("constant", array.dtype, array.shape, array.tobytes().hex())
    except Exception:  # Such as a key of random numbers, or a tracer.
        return _digest("constant", getattr(value, "aval", type(value)))


def _digest(*parts: Any) -> str:
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
