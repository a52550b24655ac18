"""The two ways to shard a layer over the axis: by its output or by its input features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import RecipeName


@dataclass(frozen=True)
class Column:
    """Shards the output features of a layer over the axis and gathers its input.

    If the axis does not divide S, as in decoding with S = 1, the input is not sharded and is not
    gathered.

    Args:
      gather_dimension: the dimension of the input [..., S, K] that is sharded between layers;
        negative numbers count from the features, as if they were one dimension. None: the input is
        the same on every device.
      fp8: None, or the recipe by which operands are quantized to 8 bits, or the name of a
        registered format, as the ops take it.
      copies: number of devices that compute the same of the first output feature dimension, such
        as heads of keys and values that are fewer than devices. Then that dimension times copies is
        the size of the axis, also in the result, and parameters are whole on every device.
    """

    gather_dimension: int | None = -2
    fp8: RecipeName | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)


@dataclass(frozen=True)
class Row:
    """Shards the input features of a layer over the axis and scatters the sum of its results.

    If the axis does not divide S, the sum is the same on every device.

    Args:
      scatter_dimension: the dimension of the result [..., S, N] to shard; negative numbers count
        from the features, as if they were one dimension. None: the sum is the same on every device.
      fp8: as for `Column`.
    """

    scatter_dimension: int | None = -2
    fp8: RecipeName | None = None

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)


@dataclass(frozen=True)
class Heads:
    """Divides the heads of an attention module over the axis; one gather feeds q, k and v.

    The query, key and value layers are column-parallel, the output layer is row-parallel. The
    attention itself, with its masks, dropout and cache, is the module's own, on each device's
    heads.

    Args:
      gather_dimension: as for `Column`, of the inputs [..., S, features].
      scatter_dimension: as for `Row`, of the result [..., S, features].
      fp8: as for `Column`, of all four layers.
    """

    gather_dimension: int | None = -2
    scatter_dimension: int | None = -2
    fp8: RecipeName | None = None

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)

    def layers(self, copies: int = 1) -> dict[str, Column | Row]:
        """The styles of the layers inside Flax's attention modules, by name.

        Args:
          copies: the number of devices that compute each head of keys and values.
        """
        column = Column(self.gather_dimension, self.fp8)
        key_value = Column(self.gather_dimension, self.fp8, copies)
        return {
            "query": column,
            "key": key_value,
            "value": key_value,
            "out": Row(self.scatter_dimension, self.fp8),
        }


#: A parallel style.
ParallelStyle = Column | Row | Heads

#: A style for each `fnmatch` pattern over dotted paths; ``*`` matches dots too.
ParallelStyles = Mapping[str, ParallelStyle]
