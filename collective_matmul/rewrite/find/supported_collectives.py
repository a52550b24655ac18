"""The collectives that a site may have, independent of the JAX version that traced them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn

from collective_matmul.jaxprs.collectives import axes_of
from collective_matmul.jaxprs.walks import Holds

CollectiveKind = Literal["all_gather", "reduce_scatter", "psum"]
_KINDS: dict[str, CollectiveKind] = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum": "psum",
    "psum_invariant": "psum",
}


@dataclass(frozen=True)
class Collective:
    """An equation that gathers or sums over one mesh axis.

    Attributes:
      kind: which collective it is.
      axis_name: the mesh axis.
      devices: the size of the axis.
      dimension: the gathered or scattered dimension; None for psum.
      tiled: whether `dimension` is concatenated or split over the devices. If not, each device
        has one index of it.
    """

    kind: CollectiveKind
    axis_name: str
    devices: int
    dimension: int | None = None
    tiled: bool = True


def kind_of(equation: JaxprEqn) -> CollectiveKind | None:
    """The kind of a collective that a matmul may hide; None for any other equation."""
    return _KINDS.get(equation.primitive.name)


#: Whether a jaxpr has equations with a `kind_of`, at any depth.
holds_collectives = Holds(kind_of)


def collective_of(equation: JaxprEqn, axis_sizes: Mapping[str, int]) -> Collective | str:
    """Describes a collective, or says why the ops cannot execute it.

    Args:
      equation: an equation with a `kind_of`.
      axis_sizes: the manual axes around the equation, with their sizes.
    """
    kind, axes, parameters = kind_of(equation), axes_of(equation), equation.params
    assert kind is not None
    if len(axes) != 1:
        return f"it communicates over {len(axes)} axes at once, {axes}; the ops take one axis"
    (axis,) = axes
    if axis not in axis_sizes:
        return f"{axis!r} is not an axis of a shard_map around it"
    if parameters.get("axis_index_groups") is not None:
        return "it communicates in groups (axis_index_groups); the ops take whole axes"
    if len(equation.invars) != 1:
        return f"it sums {len(equation.invars)} arrays at once; overlap takes sums of one array"
    if equation.primitive.name == "all_gather_invariant":
        return "its result is typed as the same on all devices (to='invarying')"
    name = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}.get(kind)
    dimension = None if name is None else parameters[name]
    return Collective(kind, axis, axis_sizes[axis], dimension, parameters.get("tiled", True))
