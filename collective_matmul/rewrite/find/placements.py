"""Where arrays are over Explicit mesh axes, and which equations communicate, by their types.

Over one mesh axis, a placement is the dimension that the axis shards; None if all devices have the
same; or `PARTIAL` if each device has a summand (an array of type "unreduced").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from collective_matmul.jaxprs.graph import Atom, Shape, type_of
from collective_matmul.jaxprs.walks import Holds, distinct_equations
from collective_matmul.rewrite.find.commuting import RESHAPES

PARTIAL = "partial"
#: Anything else, such as an operand of a product of summands.
OTHER = "other"
Placement = int | str | None


def spec_of(atom: Atom) -> PartitionSpec:
    """How the explicit axes shard an array, by its type."""
    sharding = getattr(type_of(atom), "sharding", None)
    return PartitionSpec() if sharding is None else sharding.spec


def placement(atom: Atom, axis: str) -> Placement:
    """The placement of an array over an axis."""
    spec = spec_of(atom)
    if axis in spec.unreduced:
        # 0.12: may be another operation than a sum.
        kind = getattr(getattr(spec, "unreduced_kind", None), "name", "sum")
        return PARTIAL if kind.lower() == "sum" else OTHER
    for dimension, entry in enumerate(spec.partitions):
        if axis in _names(entry):
            return dimension
    return None


def _is_typed(equation: JaxprEqn, axis: str) -> bool:
    """Whether an axis is of type Explicit in the result, which else may be sharded in any way."""
    (result,) = map(type_of, equation.outvars)
    return axis in result.sharding.mesh.explicit_axes


def axes_together(atom: Atom) -> list[tuple[str, ...]]:
    """The axes that shard a dimension together, for each dimension that several shard."""
    return [names for names in _names_by_dimension(atom) if len(names) > 1]


def is_shared(atom: Atom, axis: str) -> bool:
    """Whether the dimension of an array that an axis shards is sharded over other axes as well."""
    return any(axis in group for group in axes_together(atom))


def is_minor(atom: Atom, axis: str) -> bool:
    """Whether an axis divides the blocks of all axes that shard a dimension together with it."""
    return all(group[-1] == axis for group in axes_together(atom) if axis in group)


def misplaced_by_xla(atom: Atom) -> bool:
    """Whether axes shard a dimension of an array in another order than that of the mesh.

    If such an array is a sum that is scattered, XLA up to jaxlib 0.12 puts its blocks in the places
    of others.
    """
    order = type_of(atom).sharding.mesh.axis_names
    names = (map(order.index, each) for each in _names_by_dimension(atom))
    return any(places != sorted(places) for places in map(list, names))


def local_shape(atom: Atom, axes: Set[str]) -> Shape:
    """The shape of what a device has of an array, if only these axes shard it."""
    spec, shape = spec_of(atom), type_of(atom).shape
    sizes = type_of(atom).sharding.mesh.shape if spec.partitions else {}
    return tuple(
        size // math.prod(sizes[name] for name in names if name in axes)
        for size, names in zip(shape, _names_by_dimension(atom), strict=True)
    )


def _names_by_dimension(atom: Atom) -> list[tuple[str, ...]]:
    """The axes that shard each dimension of an array, in their order."""
    return _by_dimension(spec_of(atom), type_of(atom).ndim)


def _by_dimension(spec: PartitionSpec, dimensions: int) -> list[tuple[str, ...]]:
    names = [_names(entry) for entry in spec.partitions]
    return [*names, *[()] * (dimensions - len(names))]


def _names(entry: Any) -> tuple[str, ...]:
    """The axes that an entry of a spec names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _stride(atom: Atom, axis: str) -> int | None:
    """How many elements, in memory, are between the blocks that an axis divides an array into.

    Of a reshaped array, a device has the same elements if this stays the same. None if no dimension
    is sharded over the axis.
    """
    dimension = placement(atom, axis)
    if not isinstance(dimension, int):
        return None
    shape, mesh = type_of(atom).shape, type_of(atom).sharding.mesh.shape
    names = _names_by_dimension(atom)[dimension]
    outer = math.prod(mesh[name] for name in names[: names.index(axis) + 1])
    return math.prod(shape[dimension:]) // outer


def without_axes(spec: PartitionSpec, axes: Set[str]) -> PartitionSpec:
    """The spec, naming none of the axes."""
    return _filtered(spec, lambda axis: axis not in axes)


def only_axes(spec: PartitionSpec, axes: Set[str]) -> PartitionSpec:
    """The spec, naming no other axes."""
    return _filtered(spec, lambda axis: axis in axes)


def _filtered(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
    entries = []
    for entry in spec.partitions:
        kept = tuple(filter(keep, _names(entry)))
        entries.append(kept if len(kept) > 1 else kept[0] if kept else None)
    unreduced, reduced = (frozenset(filter(keep, s)) for s in (spec.unreduced, spec.reduced))
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def other_axes_stay(before: Atom, after: Atom, axis: str) -> bool:
    """Whether two types of an array differ over one axis only."""

    def others(atom: Atom) -> tuple:
        spec = without_axes(spec_of(atom), {axis})
        return _by_dimension(spec, type_of(atom).ndim), spec.unreduced, spec.reduced

    return others(before) == others(after)


def dot_placement(equation: JaxprEqn, lhs: Placement, rhs: Placement) -> Placement:
    """Where the result of a dot is if each device multiplies what it has; `OTHER` if it cannot."""
    contracted, batch = equation.params["dimension_numbers"]
    if OTHER in (lhs, rhs) or PARTIAL in (lhs, rhs):
        return OTHER
    for pairs, is_batch in ((contracted, False), (batch, True)):
        for index, (of_lhs, of_rhs) in enumerate(zip(*pairs, strict=True)):
            if lhs == of_lhs or rhs == of_rhs:
                both = lhs == of_lhs and rhs == of_rhs
                return (index if is_batch else PARTIAL) if both else OTHER
    if lhs is not None and rhs is not None:
        return OTHER
    rows, columns = (
        [i for i in range(type_of(atom).ndim) if i not in (*contracted[side], *batch[side])]
        for side, atom in enumerate(equation.invars)
    )
    if lhs is not None:
        return len(batch[0]) + rows.index(int(lhs))
    return None if rhs is None else len(batch[0]) + len(rows) + columns.index(int(rhs))


def gathered_operand(equation: JaxprEqn, axis: str) -> int | None:
    """The operand that must be gathered over an axis before an equation, and no other; else None.

    Of a dot, if its result is sharded over the axis or keeps a dimension of the operand whole:
    where only a contracted dimension of one operand is sharded, the other may be divided instead.
    """
    if not (may_communicate(equation) and _is_typed(equation, axis)):
        return None
    places = [placement(atom, axis) for atom in equation.invars]
    (after,) = (placement(atom, axis) for atom in equation.outvars)
    if equation.primitive.name == "reshard":
        gathers = isinstance(places[0], int) and after is None
        return 0 if gathers and is_minor(equation.invars[0], axis) else None
    if dot_placement(equation, *places) == after:
        return None
    contracted, batch = equation.params["dimension_numbers"]
    for side, place in enumerate(places):
        whole = [None if i == side else p for i, p in enumerate(places)]
        if not isinstance(place, int) or dot_placement(equation, *whole) != after:
            continue
        if not is_minor(equation.invars[side], axis):
            continue
        if place not in batch[side] and (place not in contracted[side] or after is not None):
            return side
    return None


def is_local(equation: JaxprEqn, axis: str, whole: Set[Atom] = frozenset()) -> bool:
    """Whether an equation of a region communicates nothing over an axis.

    Args:
      equation: a dot, a reshard, or one that keeps shards.
      axis: the mesh axis.
      whole: operands that have been gathered over it.
    """
    arrays = [atom for atom in equation.invars if type_of(atom).ndim]
    places = [None if atom in whole else placement(atom, axis) for atom in arrays]
    after = placement(equation.outvars[0], axis)
    if equation.primitive.name == "dot_general":
        return dot_placement(equation, *places) == after
    if equation.primitive.name == "reshard":
        return places == [after]
    if equation.primitive.name in RESHAPES:
        (operand,) = arrays
        before = None if operand in whole else _stride(operand, axis)
        stays = before == _stride(equation.outvars[0], axis)
        return stays and (places[0] == PARTIAL) == (after == PARTIAL)
    # A sum of a sharded array and one that is not.
    return len(places) < 2 or set(places) == {after}


def sums(equation: JaxprEqn, axis: str) -> bool:
    """Whether an equation is a dot that contracts a dimension that is sharded over the axis."""
    if equation.primitive.name != "dot_general" or any(is_shared(a, axis) for a in equation.invars):
        return False
    return dot_placement(equation, *(placement(a, axis) for a in equation.invars)) == PARTIAL


def why_unclear(equation: JaxprEqn, axis: str) -> str | None:
    """Why it is not clear what an equation communicates over an axis; None if it is."""
    places = [placement(atom, axis) for atom in equation.invars]
    (after,) = (placement(atom, axis) for atom in equation.outvars)
    is_reshard = equation.primitive.name == "reshard"
    local = places[0] if is_reshard else dot_placement(equation, *places)
    if local == after or (local is None and after is not None) or not _is_typed(equation, axis):
        return None
    if any(is_shared(atom, axis) for atom in (*equation.invars, *equation.outvars)):
        return f"a dimension is sharded over {axis!r} and other mesh axes at once"
    if is_reshard or local == PARTIAL or gathered_operand(equation, axis) is not None:
        return None
    return (
        "its matmul contracts a dimension that is sharded in one operand only: the compiler may"
        " divide the other or gather this one; reshard one of them"
    )


def reshard_kind(equation: JaxprEqn) -> str | None:
    """Whether a reshard gathers ("all_gather") or may scatter a sum; None for anything else."""
    if equation.primitive.name != "reshard" or not may_communicate(equation):
        return None
    gathers = any(gathered_operand(equation, axis) == 0 for axis in explicit_axes(equation))
    return "all_gather" if gathers else "reduce_scatter"


def explicit_axes(equation: JaxprEqn) -> Iterator[str]:
    """The explicit axes that the types of an equation name, each once, in their order."""
    atoms = (*equation.invars, *equation.outvars)
    yield from dict.fromkeys(axis for atom in atoms for axis in _named(spec_of(atom)))


def may_communicate(equation: JaxprEqn) -> bool:
    """Whether an equation is a reshard or a dot of arrays that explicit axes shard."""
    if equation.primitive.name not in ("reshard", "dot_general"):
        return False
    return next(explicit_axes(equation), None) is not None


def auto_axes(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The axes of type Auto and several devices, of meshes with Explicit axes that shard arrays."""
    for equation in distinct_equations(jaxpr):
        for atom in (*equation.invars, *equation.outvars):
            if next(_named(spec_of(atom)), None) is not None:
                mesh = type_of(atom).sharding.mesh
                return tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    return ()


#: Whether a jaxpr has equations that `may_communicate`, at any depth.
shows_sharding = Holds(may_communicate)


def axes_in(spec: PartitionSpec) -> frozenset[str]:
    """The axes that a spec names."""
    return frozenset(_named(spec))


def _named(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec.partitions:
        yield from _names(entry)
    yield from sorted(spec.unreduced)
