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

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from collective_matmul.jaxprs.bodies import (
    CONTROL_FLOW,
    bodies_of,
    executes_jaxprs,
    jaxprs_of,
    opened,
)
from collective_matmul.jaxprs.collectives import axes_of
from collective_matmul.jaxprs.propagation import NOTHING, Propagation
from collective_matmul.jaxprs.walks import Holds
from collective_matmul.rewrite.find.supported_collectives import holds_collectives

#: Mesh axes over which a value may differ between devices.
Axes = frozenset[str]

#: Collectives whose result is the same on all devices of the group.
_REPLICATING = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
#: Equations whose results may differ between devices in a way that no operand shows.
_UNKNOWN = frozenset({"rng_uniform", "infeed", "device_constant"})
_CHOOSING = frozenset({"cond", "while"})
#: Whether a branch or a loop in a jaxpr, at any depth, contains a gather or a sum.
_chooses_communication = Holds(
    lambda equation: (
        equation.primitive.name in _CHOOSING and any(map(holds_collectives, jaxprs_of(equation)))
    )
)


@dataclass(frozen=True)
class Region:
    """How devices execute a jaxpr.

    Attributes:
      divergent: mesh axes along which devices may execute it a different number of times.
      arguments: for each argument, the axes over which it may vary; None where that is irrelevant,
        because no branch or loop in the jaxpr contains a gather or a sum.
    """

    divergent: Axes = NOTHING
    arguments: tuple[Axes, ...] | None = None


#: The region of a jaxpr that all devices execute, without branches or loops of interest.
EVERYWHERE = Region()


@dataclass(frozen=True)
class Values:
    """Facts about the values in a jaxpr.

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
        return [
            NOTHING if isinstance(atom, Literal) else self.known.get(atom, self.axes)
            for atom in equation.invars
        ]


class Divergence(Propagation):
    """Follows values through jaxprs to find what devices may disagree on.

    Attributes:
      axis_sizes: all manual axes, with their sizes.
      axes: those of several devices.
    """

    entered = CONTROL_FLOW

    def __init__(self, axis_sizes: Mapping[str, int]):
        super().__init__()
        self.axis_sizes = axis_sizes
        self.axes: Axes = frozenset(axis for axis, size in axis_sizes.items() if size > 1)

    def region(self, program: Any, divergent: Axes, arguments: Sequence[Axes]) -> Region:
        """The region of a jaxpr, without what is irrelevant, so that equal calls share it."""
        jaxpr = opened(program)
        if not _chooses_communication(jaxpr):
            return Region(divergent)
        if len(arguments) != len(jaxpr.invars):
            arguments = [self.axes] * len(jaxpr.invars)
        return Region(divergent, tuple(axes & self.axes for axes in arguments))

    def unknown(self, jaxpr: Any, divergent: Axes) -> Region:
        """The region of a jaxpr of whose arguments nothing is known."""
        return self.region(jaxpr, divergent, ())

    def values(self, jaxpr: Jaxpr, region: Region) -> Values:
        """Facts about the values in a jaxpr; nothing where they are irrelevant."""
        known: dict[Any, Axes] = {}
        if region.arguments is not None:
            known = self.variables(jaxpr, dict(zip(jaxpr.invars, region.arguments, strict=True)))
        return Values(region.divergent, self.axes, known)

    def regions_in(self, equation: JaxprEqn, values: Values) -> list[Region]:
        """The regions of the jaxprs that a call, a loop or a branch executes."""
        operands, predicate = self.inside(equation, values.of(equation))
        divergent = values.divergent | predicate
        return [
            self.region(
                body.value, divergent, () if body.operands is None else body.arguments(operands)
            )
            for body in bodies_of(equation)
        ]

    def of_equation(self, equation: JaxprEqn, operands: Sequence[Axes]) -> Sequence[Axes]:
        """The axes over which each result may vary."""
        name, params = equation.primitive.name, equation.params
        joined = NOTHING.union(*operands)
        if name in _REPLICATING and params.get("axis_index_groups") is None:
            return [joined.difference(axes_of(equation))] * len(equation.outvars)
        # Communication is an effect that names its axis. Each device gets values of its own.
        effects = [getattr(effect, "name", None) for effect in equation.effects]
        if executes_jaxprs(equation) or name in _UNKNOWN or None in effects:
            return [self.axes] * len(equation.outvars)
        named = params.get("axis_name", params.get("axes", ()))
        named = {*effects, *(named if isinstance(named, tuple) else (named,))}
        return [joined | (self.axes & named)] * len(equation.outvars)
