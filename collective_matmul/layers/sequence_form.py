"""Whether a layer works on a sharded dimension or on the whole of it, decided from shapes.

A dimension that the axis divides is sharded between layers: column-parallel layers gather it and
row-parallel layers scatter it. A dimension that the axis does not divide, such as the one token of
a decoding step, is the same on every device: column-parallel layers do not gather, and row-parallel
layers sum over the axis. The layers of a block see the same size, so they choose the same form.
"""

from __future__ import annotations

import jax

from collective_matmul._compat import tracks_varying_axes, varying_axes
from collective_matmul.layers.sharding_context import (
    LeadingAxes,
    LocalShards,
    ShardingContext,
    sharded,
)
from collective_matmul.log import warn_once
from collective_matmul.ops.matmul.backends import REFERENCE


def gathered_dimension(
    context: ShardingContext, x: jax.Array, dimension: int | None, leading: LeadingAxes
) -> int | None:
    """The dimension of x that a column-parallel layer gathers, or None.

    Inside a `shard_map` only the type of x tells a whole dimension from a shard: with
    ``check_vma=True``, x is whole if it does not vary over the axis and the axis does not divide
    the dimension. With ``check_vma=False`` it is taken for a shard.

    Args:
      context: whether x is local or global.
      x: [..., S, *K] or [..., s, *K].
      dimension: the dimension that the layer's option names, counted from the front, or None.
      leading: the other axes that shard the dimensions before the features.
    """
    axis_name = context.axis_name
    if dimension is None or _is_divided(context, x, dimension, leading):
        return dimension
    if isinstance(context, LocalShards) and not (
        tracks_varying_axes(axis_name) and axis_name not in varying_axes(x)
    ):
        return dimension
    _warn_of_long_sequence("gather_dimension", context, x, dimension)
    return None


def scattered_dimension(
    context: ShardingContext, x: jax.Array, dimension: int | None, leading: LeadingAxes
) -> int | None:
    """The dimension of its result that a row-parallel layer scatters; None for an all-reduce.

    The arguments are those of `gathered_dimension`; x is whole in that dimension.
    """
    if dimension is None or _is_divided(context, x, dimension, leading):
        return dimension
    _warn_of_long_sequence("scatter_dimension", context, x, dimension)
    return None


def with_reference(implementation: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The backends for a form that the user did not ask for: the reference if all others refuse."""
    return implementation and (*implementation, REFERENCE.name)


def _is_divided(
    context: ShardingContext, x: jax.Array, dimension: int, leading: LeadingAxes
) -> bool:
    if isinstance(context, LocalShards):
        return x.shape[dimension] % context.devices == 0
    axes = sharded(leading, dimension, context.axis_name)[dimension]
    return x.shape[dimension] % context.shards(axes) == 0


def _warn_of_long_sequence(
    option: str, context: ShardingContext, x: jax.Array, dimension: int
) -> None:
    """Says that a sequence that could be padded is not sharded."""
    size, devices = x.shape[dimension], context.devices
    if size > devices:
        warn_once(
            f"{option}: size {size} of dimension {dimension} is not divisible by axis"
            f" {context.axis_name!r} of size {devices}, so every device works on the whole"
            f" dimension; pad it to {-(-size // devices) * devices} to shard it"
        )
