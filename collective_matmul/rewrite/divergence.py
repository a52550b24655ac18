"""Finds jaxprs that devices may execute a different number of times.

The predicate of a branch or a loop may differ between devices of a `shard_map`. JAX's gathers and
sums only need the devices of their own group to agree. A permute needs all devices of the program.
Whether a ring may replace a collective therefore depends on the mesh axes over which predicates
vary. They are computed here by following values from the arguments of the `shard_map`. JAX's own
types tell this only with ``check_vma=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from collective_matmul._compat import scan_counts
from collective_matmul.rewrite.collective_equations import axes_of, holds_collectives
from collective_matmul.rewrite.graph import Atom

#: Mesh axes over which a value may differ between devices.
Axes = frozenset[str]
_NONE: Axes = frozenset()

#: Collectives whose result is the same on all devices of the group.
_REPLICATING = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
#: Equations whose results may differ between devices in a way that no operand shows.
_UNKNOWN = frozenset({"rng_uniform", "infeed", "device_constant"})
_CHOOSING = frozenset({"cond", "while"})
#: Calls, whose jaxprs have the arguments of the equation.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"}
    | {"custom_vjp_call", "custom_jvp_call"}
)


@dataclass(frozen=True)
class Region:
    """How devices execute a jaxpr.

    Attributes:
      divergent: mesh axes along which devices may execute it a different number of times.
      arguments: for each argument, the axes over which it may vary; None where that is irrelevant,
        because no branch or loop in the jaxpr contains a gather or a sum.
    """

    divergent: Axes = _NONE
    arguments: tuple[Axes, ...] | None = None


#: The region of a jaxpr that all devices execute, without branches or loops of interest.
EVERYWHERE = Region()


@dataclass(frozen=True)
class Values:
    """What is known of the values in a jaxpr.

    Attributes:
      divergent: the divergent axes of the jaxpr's region.
      axes: the axes over which any unknown value may vary.
      known: for each variable, the axes over which it may vary.
    """

    divergent: Axes
    axes: Axes
    known: Mapping[Any, Axes]

    def of(self, equation: JaxprEqn) -> list[Axes]:
        """For each operand of an equation, the axes over which it may vary."""
        return [_axes_of(self.known, atom, self.axes) for atom in equation.invars]


class Divergence:
    """Follows values through jaxprs to find what devices may disagree on.

    Args:
      axis_sizes: all manual axes, with their sizes.
    """

    def __init__(self, axis_sizes: Mapping[str, int]):
        self.axes: Axes = frozenset(axis for axis, size in axis_sizes.items() if size > 1)
        self._results: dict[tuple, tuple[Any, tuple[Axes, ...]]] = {}
        self._relevant: dict[int, tuple[Any, bool]] = {}

    def region(self, jaxpr: Any, divergent: Axes, arguments: Sequence[Axes]) -> Region:
        """The region of a jaxpr, without what is irrelevant, so that equal calls share it."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if id(inner) not in self._relevant:
            # Keep the jaxpr alive, so that no other object gets its id.
            self._relevant[id(inner)] = inner, _chooses_communication(inner)
        if not self._relevant[id(inner)][1]:
            return Region(divergent)
        if len(arguments) != len(inner.invars):
            arguments = [self.axes] * len(inner.invars)
        return Region(divergent, tuple(axes & self.axes for axes in arguments))

    def unknown(self, jaxpr: Any, divergent: Axes) -> Region:
        """The region of a jaxpr of whose arguments nothing is known."""
        return self.region(jaxpr, divergent, ())

    def values(self, jaxpr: Jaxpr, region: Region) -> Values:
        """What is known of the values in a jaxpr; nothing where that is irrelevant."""
        known = {} if region.arguments is None else self._variations(jaxpr, region.arguments)
        return Values(region.divergent, self.axes, known)

    def inside(self, equation: JaxprEqn, values: Values) -> dict[str, tuple[Region, ...]]:
        """The regions of the jaxprs that a call, a loop or a branch executes, by its parameters."""
        name, params = equation.primitive.name, equation.params
        operands, divergent = values.of(equation), values.divergent
        if name == "cond":
            branches, divergent = params["branches"], divergent | operands[0]
            return {"branches": tuple(self.region(b, divergent, operands[1:]) for b in branches)}
        if name == "while":
            of_cond, of_body, carry, predicate = self._while(equation, operands)
            arguments = {"cond_jaxpr": of_cond + carry, "body_jaxpr": of_body + carry}
            divergent |= predicate
            return {
                key: (self.region(params[key], divergent, each),) for key, each in arguments.items()
            }
        if name == "scan":
            operands = self._scan(equation, operands)
        return {
            key: (self.region(value, divergent, operands),)
            for key, value in params.items()
            if isinstance(getattr(value, "jaxpr", value), Jaxpr)
        }

    def _variations(self, jaxpr: Jaxpr, arguments: Sequence[Axes]) -> dict[Any, Axes]:
        """The axes over which each variable may vary, given those of the arguments."""
        known: dict[Any, Axes] = dict.fromkeys(jaxpr.constvars, _NONE)
        known.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            operands = [_axes_of(known, atom, self.axes) for atom in equation.invars]
            known.update(zip(equation.outvars, self._of_equation(equation, operands), strict=True))
        return known

    def _of_equation(self, equation: JaxprEqn, operands: Sequence[Axes]) -> Sequence[Axes]:
        """The axes over which each result of an equation may vary."""
        name, params = equation.primitive.name, equation.params
        joined = _NONE.union(*operands)
        if name in _REPLICATING and params.get("axis_index_groups") is None:
            return [joined.difference(axes_of(equation))] * len(equation.outvars)
        if name == "cond":
            results = [self._returned(branch, operands[1:]) for branch in params["branches"]]
            return [operands[0].union(*each) for each in zip(*results, strict=True)]
        if name == "while":
            *_, carry, predicate = self._while(equation, operands)
            return [axes | predicate for axes in carry]
        if name == "scan":
            return self._returned(params["jaxpr"], self._scan(equation, operands))
        inner = list(jaxprs_in_params(params))
        if name in CALLS and len(inner) == 1 and len(inner[0].invars) == len(operands):
            return self._returned(inner[0], operands)
        # Communication is an effect that names its axis. Each device gets values of its own.
        effects = [getattr(effect, "name", None) for effect in equation.effects]
        if inner or name in _UNKNOWN or None in effects:
            return [self.axes] * len(equation.outvars)
        named = params.get("axis_name", params.get("axes", ()))
        named = {*effects, *(named if isinstance(named, tuple) else (named,))}
        return [joined | (self.axes & named)] * len(equation.outvars)

    def _returned(self, jaxpr: Any, arguments: Sequence[Axes]) -> tuple[Axes, ...]:
        """The axes over which each result of a jaxpr may vary."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        key = id(inner), tuple(arguments)
        if key not in self._results:
            known = self._variations(inner, arguments)
            # Keep the jaxpr alive, so that no other object gets its id.
            self._results[key] = (
                inner,
                tuple(_axes_of(known, atom, self.axes) for atom in inner.outvars),
            )
        return self._results[key][1]

    def _scan(self, equation: JaxprEqn, operands: Sequence[Axes]) -> list[Axes]:
        """The axes over which each argument of a scan's body may vary, in any step."""
        consts, carries = scan_counts(equation.params)
        arguments = list(operands)
        while True:
            results = self._returned(equation.params["jaxpr"], arguments)[:carries]
            before = arguments[consts : consts + carries]
            carry = [a | b for a, b in zip(before, results, strict=True)]
            if carry == before:
                return arguments
            arguments[consts : consts + carries] = carry

    def _while(
        self, equation: JaxprEqn, operands: Sequence[Axes]
    ) -> tuple[list[Axes], list[Axes], list[Axes], Axes]:
        """The axes of a loop's constants, of its condition and its body, carry and predicate."""
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body = list(operands[:first]), list(operands[first:second])
        carry = list(operands[second:])
        while True:
            (predicate,) = self._returned(params["cond_jaxpr"], of_cond + carry)
            results = self._returned(params["body_jaxpr"], of_body + carry)
            joined = [a | b | predicate for a, b in zip(carry, results, strict=True)]
            if joined == carry:
                return of_cond, of_body, carry, predicate
            carry = joined


def axes_of_spec(spec: Any) -> Axes:
    """The mesh axes that a `PartitionSpec` names, over which a shard differs between devices."""
    named = [
        axis
        for entry in spec.partitions
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    ]
    return frozenset(named).difference({None}).union(getattr(spec, "unreduced", ()))


def _axes_of(known: Mapping[Any, Axes], atom: Atom, unknown: Axes) -> Axes:
    """The axes over which an operand may vary."""
    return _NONE if isinstance(atom, Literal) else known.get(atom, unknown)


def _chooses_communication(jaxpr: Jaxpr) -> bool:
    """Whether a branch or a loop in the jaxpr, at any depth, contains a gather or a sum."""
    for equation in jaxpr.eqns if holds_collectives(jaxpr) else ():
        inner = list(filter(holds_collectives, jaxprs_in_params(equation.params)))
        if inner and equation.primitive.name in _CHOOSING:
            return True
        if any(map(_chooses_communication, inner)):
            return True
    return False
