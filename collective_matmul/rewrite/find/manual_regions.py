"""Writes equations of Explicit mesh axes as one `shard_map`, with the communication spelled out.

Arrays in the `shard_map` are local over the axes that it makes manual, and keep their sharding over
the others. The rest of `overlap` then sees a gather or a sum over devices, and matmuls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from collective_matmul._compat import ShardingTypeError, ends_the_process, traced_as
from collective_matmul.jaxprs.bodies import called
from collective_matmul.jaxprs.graph import Atom, Graph, type_of, variables
from collective_matmul.rewrite.find.commuting import CommutingOp, commuting_op
from collective_matmul.rewrite.find.placements import (
    axes_in,
    axes_together,
    is_local,
    is_minor,
    local_shape,
    only_axes,
    placement,
    spec_of,
    without_axes,
)
from collective_matmul.rewrite.find.supported_collectives import CollectiveKind

ADDITIONS = {"add": lax.add, "add_any": lax.add, "sub": lax.sub}
#: Primitives of sums over devices.
_SUMS = ("psum", "psum_invariant", "reduce_scatter")
_SHARED = "a dimension is sharded over several mesh axes at once"
#: XLA cannot sum over one device beside axes that are left to it, as gradients would be.
_ONE_DEVICE = "a mesh axis of it has one device, and others of several are left to the compiler"
_BINARY: dict[str, Callable] = {**ADDITIONS, "mul": lax.mul, "div": lax.div}


@dataclass(frozen=True)
class ManualRegion:
    """Equations that become one `shard_map`.

    Attributes:
      axes: the axes that it communicates over. Those of one device become manual with them.
      anchor: index of the equation that it is reported as.
      equations: indices of the equations, in order.
      gathered: the arrays that are gathered, with the axis and the dimension.
      summed: the axis of the sum of the last equation's result; None if there is none.
      copied: indices of those equations that stay in the program for others: gathers of weights.
    """

    axes: frozenset[str]
    anchor: int
    equations: tuple[int, ...]
    gathered: Mapping[Var, tuple[str, int]] = field(default_factory=dict)
    summed: str | None = None
    copied: frozenset[int] = frozenset()

    @property
    def replaced(self) -> frozenset[int]:
        """Indices of the equations that it replaces."""
        return frozenset(self.equations) - self.copied

    def inputs(self, graph: Graph) -> list[Var]:
        """The variables that the equations read and do not make, each once."""
        equations = [graph.equations[index] for index in self.equations]
        made = {var for equation in equations for var in equation.outvars}
        read = (var for equation in equations for var in variables(equation.invars))
        return [var for var in dict.fromkeys(read) if var not in made]

    def outputs(self, graph: Graph) -> list[Var]:
        """The variables that they make and that others need."""
        made = (graph.equations[index].outvars[0] for index in sorted(self.replaced))
        return [
            var
            for var in made
            if var in graph.results or not self.replaced.issuperset(graph.users(var))
        ]

    def kind(self, graph: Graph) -> CollectiveKind:
        """The kind of its collective."""
        if self.summed is None:
            return "all_gather"
        (result,) = graph.equations[self.equations[-1]].outvars
        return "psum" if placement(result, self.summed) is None else "reduce_scatter"

    def manual(self, graph: Graph, mesh: Any) -> frozenset[str] | str:
        """The axes that become manual, or why they cannot.

        With an axis, all that shard a dimension together with it do; and all over which the
        equations are local, as that of the batch. The compiler would gather what these shard for
        collectives over the others.
        """
        equations = [graph.equations[index] for index in self.equations]
        atoms = {atom for e in equations for atom in variables((*e.invars, *e.outvars))}
        communicated = [(var, axis) for var, (axis, _) in self.gathered.items()]
        if self.summed:
            communicated.append((equations[-1].outvars[0], self.summed))
        if not all(is_minor(var, axis) for var, axis in communicated):
            return _SHARED
        groups = {group for atom in atoms for group in axes_together(atom)}
        needed, before = self.axes, frozenset[str]()
        while needed != before:
            before = needed
            needed = needed.union(*(group for group in groups if needed.intersection(group)))
        touched = [group for group in groups if needed.intersection(group)]
        local = all(
            is_local(equation, axis) for equation in equations for axis in needed - self.axes
        )
        if not local or _in_two_orders(touched):
            return _SHARED
        # None whose dimension another axis shards that is not manual, or shards in two orders.
        single = {axis for axis, size in mesh.shape.items() if size == 1}
        more = single.union(
            axis
            for axis in mesh.explicit_axes
            if all(is_local(equation, axis) for equation in equations)
        ).difference(_in_two_orders(groups))
        for _ in mesh.axis_names:
            for group in groups:
                if not needed.union(more).issuperset(group):
                    more = more.difference(group)
        manual = needed | more
        if all(axis in manual for axis, size in mesh.shape.items() if size > 1):
            return manual
        # XLA has to compile gradients beside the axes that are left to it. One that shards a
        # dimension together with a manual axis must be manual too.
        manual -= (single - needed).difference(*groups)
        replicated = (manual - axes_in(spec_of(var)) for var in self.inputs(graph))
        sums_over_one = self.axes <= single or any(axes and axes <= single for axes in replicated)
        return _ONE_DEVICE if sums_over_one else manual


def _in_two_orders(groups: Iterable[tuple[str, ...]]) -> set[str]:
    """The axes of which two shard one dimension in an order, and another in the other order."""
    orders = {pair for group in groups for pair in itertools.combinations(group, 2)}
    return {axis for pair in orders if pair[::-1] in orders for axis in pair}


def commutes(graph: Graph, equation: JaxprEqn) -> CommutingOp | None:
    """An equation that can be executed before or after a gather or a sum; None for any other."""
    op = commuting_op(graph, equation)
    if op is None or equation.primitive.name in ("pvary", "sharding_constraint"):
        return None
    scalars = (atom for atom in equation.invars if atom is not op.operand)
    return op if all(type_of(atom).ndim == 0 for atom in scalars) else None


def as_shard_map(graph: Graph, region: ManualRegion) -> JaxprEqn | str:
    """The region as one `shard_map` equation, or why there is none of the same types."""
    inputs, outputs = region.inputs(graph), region.outputs(graph)
    if any(spec.reduced or spec.unreduced for spec in map(spec_of, (*inputs, *outputs))):
        return "an array that it reads or makes is typed as reduced or unreduced over a mesh axis"
    mesh = next(type_of(v).sharding.mesh for v in inputs if any(spec_of(v).partitions))
    manual = region.manual(graph, mesh)
    if isinstance(manual, str):
        return manual
    # What is gathered or multiplied alike on all devices is not typed so. Loops cannot keep what
    # `check_vma` adds beside axes that stay explicit.
    check_vma = set(mesh.axis_names) == manual and not any(
        placement(var, axis) is None for var in outputs for axis in manual - {region.summed}
    )

    def body(*arrays: jax.Array) -> tuple:
        local = _LocalRegion(graph, region, manual, dict(zip(inputs, arrays, strict=True))).run()
        return tuple(local[var] for var in outputs)

    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(only_axes(spec_of(var), manual) for var in inputs),
            out_specs=tuple(only_axes(spec_of(var), manual) for var in outputs),
            axis_names=set(manual),
            check_vma=check_vma,
        )
        try:
            program = jax.make_jaxpr(sharded)(*map(type_of, inputs)).jaxpr
        except ShardingTypeError:
            return "JAX cannot type it inside a shard_map that leaves other mesh axes explicit"
    (equation,) = program.eqns
    for var, made in zip(outputs, equation.outvars, strict=True):
        if type_of(var) != type_of(made):
            return f"a shard_map would make {type_of(made).str_short()} of it"
    source = graph.equations[region.anchor].source_info
    invars = [inputs[program.invars.index(atom)] for atom in equation.invars]
    return equation.replace(invars=invars, outvars=outputs, source_info=source)


def gradients_end_the_process(equation: JaxprEqn) -> bool:
    """Whether XLA for CPUs cannot compile the gradients of a `shard_map`.

    JAX sums those of an operand over the axes that do not shard it, in its own dtype.
    """
    mesh, manual, several = _axes_of(equation)
    specs = zip(equation.invars, equation.params["in_specs"], strict=True)
    with jax.sharding.use_abstract_mesh(mesh):
        return not manual.issuperset(several) and any(
            ends_the_process(type_of(atom).dtype) and not axes_in(spec).issuperset(several & manual)
            for atom, spec in specs
        )


def sums_cannot_be_compiled(equation: JaxprEqn) -> bool:
    """Whether a `shard_map` that leaves axes has a sum, which no op replaced, that is not compiled.

    XLA for CPUs ends the process at sums in 16 bits. JAX 0.12 does not lower `lax.psum_scatter`
    beside axes of type Explicit: it takes the spec of the array for that of a scalar.
    """
    mesh, manual, several = _axes_of(equation)
    sums = [made for made in called(equation).eqns if made.primitive.name in _SUMS]
    scatters = any(made.primitive.name == "reduce_scatter" for made in sums)
    if scatters and not manual.issuperset(mesh.explicit_axes):
        return True
    with jax.sharding.use_abstract_mesh(mesh):
        return not manual.issuperset(several) and any(
            ends_the_process(type_of(made.invars[0]).dtype) for made in sums
        )


def _axes_of(equation: JaxprEqn) -> tuple[Any, frozenset[str], set[str]]:
    """The mesh of a `shard_map`, the axes that it makes manual, and those of several devices."""
    mesh = equation.params["mesh"]
    several = {axis for axis, size in mesh.shape.items() if size > 1}
    return mesh, equation.params["newly_manual_axes"], several


class _LocalRegion:
    """The equations of a region, executed on local arrays."""

    def __init__(
        self,
        graph: Graph,
        region: ManualRegion,
        manual: frozenset[str],
        arrays: dict[Var, jax.Array],
    ):
        self._graph, self._region, self._manual = graph, region, manual
        self._arrays = arrays
        self._whole: dict[Var, jax.Array] = {}
        self._has_explicit_axes = bool(jax.sharding.get_abstract_mesh().explicit_axes)

    def run(self) -> dict[Var, jax.Array]:
        """Executes the equations. Returns all arrays, by their variables."""
        for index in self._region.equations:
            equation = self._graph.equations[index]
            with traced_as(equation.source_info):
                result = self._result(equation)
                if self._region.summed and index == self._region.equations[-1]:
                    result = self._sum(equation.outvars[0], result)
                self._arrays[equation.outvars[0]] = result
        return self._arrays

    def _sum(self, var: Var, array: jax.Array) -> jax.Array:
        axis = self._region.summed
        assert axis is not None
        dimension = placement(var, axis)
        if dimension is None:
            return lax.psum(array, axis)
        assert isinstance(dimension, int)
        return lax.psum_scatter(array, axis, scatter_dimension=dimension, tiled=True)

    def _operand(self, atom: Atom) -> Any:
        """An operand of an equation, gathered if the region gathers it."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val, type_of(atom).dtype)
        if atom not in self._region.gathered:
            return self._arrays[atom]
        if atom not in self._whole:
            axis, dimension = self._region.gathered[atom]
            self._whole[atom] = lax.all_gather(self._arrays[atom], axis, axis=dimension, tiled=True)
        return self._whole[atom]

    def _spec(self, var: Var) -> Any:
        """How the explicit axes that are left shard an array; None if there are none."""
        return without_axes(spec_of(var), self._manual) if self._has_explicit_axes else None

    def _result(self, equation: JaxprEqn) -> jax.Array:
        name, params = equation.primitive.name, equation.params
        operands: list[Any] = list(map(self._operand, equation.invars))
        (result,) = equation.outvars
        if name == "reshard":
            return operands[0]
        if name == "dot_general":
            return lax.dot_general(
                operands[0],
                operands[1],
                params["dimension_numbers"],
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
                out_sharding=self._spec(result),
            )
        if name in _BINARY:
            return _BINARY[name](*operands)
        if name == "convert_element_type":
            return lax.convert_element_type(operands[0], params["new_dtype"])
        op = commuting_op(self._graph, equation)
        if op is not None and op.reshapes:
            # A summand of each device is whole, also where the sum is typed as scattered.
            shape = local_shape(result, self._manual - {self._region.summed})
            return lax.reshape(operands[0], shape, out_sharding=self._spec(result))
        made = equation.primitive.bind(*operands, **params)
        return made[0] if equation.primitive.multiple_results else made
