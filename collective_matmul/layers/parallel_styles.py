"""The two ways to shard a layer over the axis: by its output or by its input features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """Shards the output features of a layer over the axis and gathers its input.

    Args:
      gather_dimension: the dimension of the input [..., S, K] that is sharded between layers;
        negative numbers count from the features. None: the input is the same on every device.
    """

    gather_dimension: int | None = -2


@dataclass(frozen=True)
class Row:
    """Shards the input features of a layer over the axis and scatters the sum of its results.

    Args:
      scatter_dimension: the dimension of the result [..., S, N] to shard; negative numbers count
        from the features. None: the sum is the same on every device.
    """

    scatter_dimension: int | None = -2


#: A style for each `fnmatch` pattern over dotted paths; ``*`` matches dots too.
ParallelStyles = Mapping[str, Column | Row]
