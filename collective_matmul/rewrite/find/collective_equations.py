"""The collectives that a site may have, independent of the JAX version that traced them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn

from collective_matmul.hardware import Rates
from collective_matmul.jaxprs.graph import type_of
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


def axes_of(equation: JaxprEqn) -> tuple:
    """The mesh axes that a collective communicates over."""
    parameters = equation.params
    axes = parameters["axes"] if "axes" in parameters else parameters["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def is_collective_kernel(equation: JaxprEqn) -> bool:
    """Whether NCCL's kernels execute the equation: any communication but that of permutes."""
    if equation.primitive.name in ("axis_index", "ppermute"):
        return False
    communicates = any(type(effect).__name__ == "NamedAxisEffect" for effect in equation.effects)
    return communicates and not equation.params.keys().isdisjoint(("axes", "axis_name"))


def collective_seconds(equation: JaxprEqn, axis_sizes: Mapping[str, int], gpu: Rates) -> float:
    """Predicted seconds of a collective alone, over NVLink; 0 over axes of one device.

    Args:
      equation: an equation that communicates between all devices of its axes.
      axis_sizes: the sizes of mesh axes.
      gpu: rates of the devices.
    """
    devices = math.prod(axis_sizes.get(axis, 1) for axis in axes_of(equation))
    if groups := equation.params.get("axis_index_groups"):
        devices = max(map(len, groups))
    if devices == 1:
        return 0.0
    kind = kind_of(equation)
    larger = equation.outvars if kind == "all_gather" else equation.invars
    arrays = map(type_of, larger)
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    sums = equation.primitive.name.startswith(("psum", "pmax", "pmin"))
    passes = 2 if sums else 1
    return gpu.collective_seconds + passes * size * (devices - 1) / devices / gpu.link_bytes


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
