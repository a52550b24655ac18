"""Finds, by the types of arrays, weights that a second Explicit mesh axis shards.

They are gathered to be multiplied, by a reshard or because the type of the product asks for it. A
region that holds the product gathers them itself, so that its op can do so in its own loop.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import jax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, reshard

from collective_matmul.jaxprs.graph import Graph, type_of
from collective_matmul.rewrite.find.manual_regions import ManualRegion, commutes, other_axes_stay
from collective_matmul.rewrite.find.placements import (
    explicit_axes,
    gathered_operand,
    is_local,
    may_communicate,
    placement,
    spec_of,
    without_axes,
)


@dataclass(frozen=True)
class ExplicitWeight:
    """A weight of a dot that a mesh axis shards.

    Attributes:
      axis: the mesh axis.
      shard: the array that is gathered.
      dimension: its dimension that is gathered.
      index: index of the equation that asks for the gather: a reshard, or the dot.
      between: indices of the equations from the reshard to the dot; none if the dot asks.
    """

    axis: str
    shard: Var
    dimension: int
    index: int
    between: tuple[int, ...]


def weight_of(graph: Graph, dot: int, axis: str) -> ExplicitWeight | None:
    """The second operand of a dot, if it is gathered over another axis than `axis`.

    And if nothing but dots, as their second operand, needs it whole.
    """
    equation = graph.equations[dot]
    weight = equation.invars[1]
    for other in explicit_axes(equation):
        if other != axis and gathered_operand(equation, other) == 1:
            return _weight(weight, other, dot, ())
    between: list[int] = []
    while (index := graph.producer(weight)) is not None:
        between.append(index)
        equation = graph.equations[index]
        if equation.primitive.name == "reshard":
            break
        op = commutes(graph, equation)
        if op is None:
            return None
        weight = op.operand
    if index is None or not may_communicate(equation) or not _is_weight(graph, index):
        return None
    for other in explicit_axes(equation):
        if other != axis and gathered_operand(equation, other) == 0:
            before, after = equation.invars[0], equation.outvars[0]
            if other_axes_stay(before, after, other):
                return _weight(before, other, index, tuple(reversed(between)))
    return None


def with_weights(
    graph: Graph, region: ManualRegion
) -> tuple[ManualRegion, list[ExplicitWeight]] | None:
    """A region with the gathers of the weights of all its dots, over one further axis.

    Returns:
      The region, and the weights in the order of the program; None if there are none such.
    """
    (axis,) = region.axes
    equations = graph.equations
    if region.summed and placement(equations[region.equations[-1]].outvars[0], axis) is None:
        return None  # Nothing of an all-reduce is divided into chunks.
    dots = [i for i in region.equations if equations[i].primitive.name == "dot_general"]
    found = [weight_of(graph, dot, axis) for dot in dots]
    weights = {weight.shard: weight for weight in found if weight is not None}
    axes = {weight.axis for weight in weights.values()}
    if None in found or len(axes) != 1:
        return None
    (other,) = axes
    whole = {equations[dot].invars[1] for dot in dots}
    copied = frozenset(i for weight in weights.values() for i in weight.between)
    all_equations = tuple(sorted(copied.union(region.equations)))
    gathers_alone = all(
        atom not in region.gathered and gathered_operand(equations[index], other) == side
        for index in all_equations
        for side, atom in enumerate(equations[index].invars)
        if isinstance(atom, Var) and atom in weights
    )
    asking = {weight.index for weight in weights.values()}
    local = all(is_local(equations[index], other, whole) for index in region.equations)
    local &= all(is_local(equations[index], axis) for index in copied)
    local &= all(is_local(equations[index], other) for index in copied - asking)
    if not gathers_alone or not local:
        return None
    gathered = {shard: (other, weight.dimension) for shard, weight in weights.items()}
    extended = replace(
        region,
        axes=region.axes | axes,
        equations=all_equations,
        gathered={**region.gathered, **gathered},
        copied=copied,
    )
    return extended, sorted(weights.values(), key=lambda weight: weight.index)


def gathered_once(graph: Graph) -> tuple[Graph, list[JaxprEqn]]:
    """The jaxpr, in which dots share the gathers that their types ask for.

    A region that gathers weights holds none of the gradients of weights, which are sums over the
    weights' axis. These get an array that both need from a reshard before them.

    Returns:
      The jaxpr, the same object if nothing changes; and the equations of the program that its
      equations come from.
    """
    dots: dict[tuple[Var, str], list[int]] = defaultdict(list)
    for index, equation in enumerate(graph.equations):
        if equation.primitive.name == "dot_general" and may_communicate(equation):
            for axis in explicit_axes(equation):
                side = gathered_operand(equation, axis)
                var = None if side is None else equation.invars[side]
                if isinstance(var, Var):
                    dots[var, axis].append(index)
    equations = list(graph.equations)
    before: dict[int, list[JaxprEqn]] = defaultdict(list)
    for (var, axis), users in dots.items():
        if len(users) > 1 and any(weight_of(graph, user, axis) for user in users):
            gather = _reshard(graph, var, axis, users[0])
            before[users[0]].append(gather)
            for user in users:
                new = [gather.outvars[0] if a is var else a for a in equations[user].invars]
                equations[user] = equations[user].replace(invars=new)
    if not before:
        return graph, equations
    result, sources = [], []
    for index, equation in enumerate(equations):
        result += [*before[index], equation]
        sources += [graph.equations[index]] * (len(before[index]) + 1)
    return Graph(graph.jaxpr.replace(eqns=result)), sources


def _reshard(graph: Graph, var: Var, axis: str, index: int) -> JaxprEqn:
    """The gather of an array over an axis, before equation `index`."""
    sharding = NamedSharding(type_of(var).sharding.mesh, without_axes(spec_of(var), {axis}))
    program = jax.make_jaxpr(lambda array: reshard(array, sharding))(type_of(var))
    (equation,) = program.jaxpr.eqns
    outvars = [Var(type_of(equation.outvars[0]))]
    source = graph.equations[index].source_info
    return equation.replace(invars=[var], outvars=outvars, source_info=source)


def _weight(atom: object, axis: str, index: int, between: tuple[int, ...]) -> ExplicitWeight | None:
    if not isinstance(atom, Var):
        return None
    dimension = placement(atom, axis)
    assert isinstance(dimension, int)
    return ExplicitWeight(axis, atom, dimension, index, between)


def _is_weight(graph: Graph, index: int) -> bool:
    """Whether only dots use the result of an equation, as their second operand."""
    (var,) = graph.equations[index].outvars
    if var in graph.results:
        return False
    for user in graph.users(var):
        equation = graph.equations[user]
        if equation.primitive.name == "dot_general":
            if equation.invars[0] is var:
                return False
        elif commutes(graph, equation) is None or not _is_weight(graph, user):
            return False
    return True
