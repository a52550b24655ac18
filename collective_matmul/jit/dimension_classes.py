"""Classes of dimensions of arrays that the compiler shards alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

#: One class of dimensions for each dimension of an array; None for those of size 1.
Dimensions = tuple[int | None, ...]
Axes = tuple[str, ...]


@dataclass
class DimensionClass:
    """What is known about dimensions that are sharded alike.

    Attributes:
      axes: the mesh axes over which they are sharded; None where nobody says.
      whole: an operation that needs elements of all devices, if the dimensions are sharded.
      disputed: an operation that joins dimensions which are sharded otherwise.
    """

    axes: Axes | None = None
    whole: JaxprEqn | None = None
    disputed: JaxprEqn | None = None


class DimensionClasses:
    """Classes of dimensions, which are joined as operations show that they are sharded alike."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._classes: list[DimensionClass] = []

    def new(self, shape: Sequence[int]) -> Dimensions:
        """New classes for the dimensions of an array."""
        first = len(self._parents)
        self._parents += range(first, first + len(shape))
        self._classes += (DimensionClass() for _ in shape)
        return tuple(None if size == 1 else first + i for i, size in enumerate(shape))

    def of(self, dimension: int) -> DimensionClass:
        """The class of a dimension."""
        return self._classes[self._root(dimension)]

    def _root(self, dimension: int) -> int:
        while (parent := self._parents[dimension]) != dimension:
            self._parents[dimension] = self._parents[parent]
            dimension = parent
        return dimension

    def join(self, one: int | None, other: int | None, equation: JaxprEqn) -> None:
        """Makes one class of two."""
        if one is None or other is None or (a := self._root(one)) == (b := self._root(other)):
            return
        self._parents[b] = a
        joined, added = self._classes[a], self._classes[b]
        joined.whole = joined.whole or added.whole
        joined.disputed = joined.disputed or added.disputed
        if added.axes is not None:
            self.shard(a, added.axes, equation)

    def shard(self, dimension: int | None, axes: Axes, equation: JaxprEqn) -> None:
        """Notes the axes over which an operation takes or returns a dimension."""
        if dimension is None:
            return
        known = self.of(dimension)
        if known.axes not in (None, axes):
            known.disputed = known.disputed or equation
        known.axes = axes

    def keep_whole(self, dimensions: Sequence[int | None], equation: JaxprEqn) -> None:
        """Notes that an operation needs all elements along dimensions."""
        for dimension in dimensions:
            if dimension is not None:
                known = self.of(dimension)
                known.whole = known.whole or equation
