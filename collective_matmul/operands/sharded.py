"""`Sharded`: a weight of which each device of a second mesh axis has a shard."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax import lax

from collective_matmul.operands.multiply import is_array


@dataclass(frozen=True)
class WeightShards:
    """The sharding of weights over a second mesh axis, over which an op gathers them.

    Attributes:
      axis_name: the mesh axis.
      axis_size: number of devices on it.
      dimension: the dimension of each weight [K, N] that is sharded.
    """

    axis_name: str
    axis_size: int
    dimension: Literal[0, 1]

    @property
    def transposed(self) -> WeightShards:
        """The sharding of the transposed weights."""
        return dataclasses.replace(self, dimension=0 if self.dimension else 1)

    def __str__(self) -> str:
        return f"{'KN'[self.dimension]} of w over {self.axis_name or 'devices'}={self.axis_size}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sharded:
    """A weight [K, N] of which `value` is this device's shard.

    Attributes:
      value: [K/F, N] or [K, N/F], with F the size of the axis: an array, or an operand in a format.
      sharding: how the weight is sharded.
    """

    value: Any
    sharding: WeightShards = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [K, N] of the whole."""
        rows, columns = self.value.shape
        size = self.sharding.axis_size
        return (size * rows, columns) if self.sharding.dimension == 0 else (rows, size * columns)

    @property
    def dtype(self) -> Any:
        """The shard's dtype."""
        return self.value.dtype

    def divides_columns(self, transpose_w: bool) -> bool:
        """Whether shards are columns of a product with the weight, and not terms of a sum."""
        return (self.sharding.dimension == 1) != transpose_w

    def gathered(self) -> Any:
        """The whole weight, of a shard that is an array or a `Matrix`."""
        axis_name, dimension = self.sharding.axis_name, self.sharding.dimension
        if is_array(self.value):
            return lax.all_gather(self.value, axis_name, axis=dimension, tiled=True)
        return self.value.gathered(axis_name, dimension)

    def with_value(self, value: Any) -> Sharded:
        """Another shard of a weight that is sharded alike."""
        return dataclasses.replace(self, value=value)


def stored(w: Any) -> Any:
    """The part of a weight that this device stores: its shard, or the weight itself."""
    return w.value if isinstance(w, Sharded) else w


def sharding_of(w: Any) -> WeightShards | None:
    """How a weight is sharded; None if it is whole."""
    return w.sharding if isinstance(w, Sharded) else None


def whole(w: Any) -> Any:
    """A weight, gathered if it is sharded."""
    return w.gathered() if isinstance(w, Sharded) else w
