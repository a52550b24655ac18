"""`ExpertAxes`: how mesh axes divide the experts of a layer and its tokens.

Legend: h features of a token, E experts, f hidden features of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import layer_checks
from collective_matmul.layers.sharding_context import (
    LeadingAxes,
    LocalShards,
    ShardingContext,
    sharded,
)
from collective_matmul.log import warn_once
from collective_matmul.ops.experts.biases import ExpertBiases
from collective_matmul.ops.experts.stored_weights import ExpertWeights


@dataclass(frozen=True)
class ExpertAxes:
    """How mesh axes divide experts and tokens.

    Attributes:
      expert_axes: the axes that experts are divided over, in the order in which they are numbered.
      hidden_axis: the axis that divides hidden features, or None.
      weight_axis: a further axis that shards dimension 1 of each weight, or None.
      token_dimensions: the dimension of global tokens that each of `all_axes` shards.
      data_axes: further axes that shard dimension 0 of global tokens.
    """

    expert_axes: tuple[str, ...]
    hidden_axis: str | None
    weight_axis: str | None
    token_dimensions: tuple[int, ...]
    data_axes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        axis_name: str | tuple[str, ...],
        hidden_axis_name: str | None,
        weight_axis_name: str | None,
        token_dimension: int | Sequence[int],
        data_axis_name: str | tuple[str, ...],
    ) -> ExpertAxes:
        """The axes that the arguments of a layer name.

        Raises:
          ValueError: if an axis is named twice, or the dimensions are not one for each.
        """
        experts = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        data = layer_checks.data_axes(data_axis_name)
        exchanged = experts if hidden_axis_name is None else (*experts, hidden_axis_name)
        named = (*exchanged, *data)
        if weight_axis_name is not None:
            layer_checks.distinct_axes((*exchanged, weight_axis_name))
        layer_checks.distinct_axes(named)
        if isinstance(token_dimension, int):
            dimensions = (token_dimension,) * len(exchanged)
        else:
            dimensions = tuple(token_dimension)
        if len(dimensions) != len(exchanged):
            raise ValueError(
                f"token_dimension={token_dimension!r}: expected one dimension, or one for each of"
                f" the axes {exchanged}"
            )
        return cls(experts, hidden_axis_name, weight_axis_name, dimensions, data)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The axes whose devices exchange tokens."""
        hidden = () if self.hidden_axis is None else (self.hidden_axis,)
        return (*self.expert_axes, *hidden)

    @property
    def local_weight_axis(self) -> str | None:
        """The weight axis, if the `shard_map` around is over that axis too."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return self.weight_axis if self.weight_axis in manual else None

    @property
    def weight_specs(self) -> ExpertWeights:
        """The partition specs of the parameters."""
        return self._specs(self.weight_axis)

    @property
    def gathered_weight_specs(self) -> ExpertWeights:
        """The partition specs of weights that the compiler gathers over the weight axis."""
        return self._specs(None)

    @property
    def bias_specs(self) -> ExpertBiases:
        """The partition specs of biases, which the weight axis does not shard."""
        experts = _entry(self.expert_axes)
        up = P(experts, self.hidden_axis)
        return ExpertBiases(up, up, P(experts, None))

    def _specs(self, weight_axis: str | None) -> ExpertWeights:
        experts, hidden = _entry(self.expert_axes), self.hidden_axis
        rows = _entry(tuple(axis for axis in (hidden, weight_axis) if axis is not None))
        up = P(experts, weight_axis, hidden)
        return ExpertWeights(up, up, P(experts, rows, None))

    def leading(self, context: ShardingContext, x: jax.Array) -> LeadingAxes:
        """The axes that shard each dimension of tokens [..., h] before the last."""
        count = x.ndim - 1
        leading = context.leading_axes(x, count)
        if isinstance(context, LocalShards):
            return leading
        data = [axis for axis in self.data_axes if axis in context.axes]
        dimensions = (*[0] * len(data), *self.token_dimensions)
        for axis, dimension in zip((*data, *self.all_axes), dimensions, strict=True):
            layer_checks.leading_dimension("token_dimension", dimension, count)
            place = dimension % (count + 1)
            longer = sharded(leading, place, axis)
            shards = context.shards(longer[place])
            if x.shape[place] % shards == 0:
                leading = longer
            elif x.shape[place] > shards:
                warn_once(
                    f"token_dimension: size {x.shape[place]} of dimension {place} is not divisible"
                    f" by {shards}, so all devices along axis {axis!r} have the same tokens; pad it"
                    f" to {-(-x.shape[place] // shards) * shards} to shard it"
                )
        return leading

    def check_weights(
        self, context: ShardingContext, ws: ExpertWeights, shape: tuple[int, int, int]
    ) -> None:
        """Checks the shapes of the weights, local or global according to `context`.

        Args:
          context: whether they are local.
          ws: the weights.
          shape: (E, h, f), global.

        Raises:
          ValueError: for other shapes.
        """
        experts, inputs, hidden = shape
        sizes = ExpertWeights(shape, shape, (experts, hidden, inputs))
        for name, w, size, spec in zip(ws._fields, ws, sizes, self.weight_specs, strict=True):
            expected, which = size, ""
            if isinstance(context, LocalShards):
                shards = map(_local_shards, spec)
                expected = tuple(n // parts for n, parts in zip(size, shards, strict=True))
            if expected != size:
                which = (
                    f", this device's shard of the global {size}; pass the parameters through"
                    " shard_map with the in_specs that nnx.get_partition_spec gives"
                )
            if w.shape != expected:
                raise ValueError(f"w_{name}: shape {w.shape}; expected {expected}{which}")


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """An entry of a partition spec."""
    return (axes[0] if len(axes) == 1 else axes) if axes else None


def _local_shards(entry: str | tuple[str, ...] | None) -> int:
    """The number of pieces that the axes of a spec's entry divide a dimension into here."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return math.prod(lax.axis_size(axis) for axis in axes if axis in manual)
