"""The memory of simulated kernels: references to NumPy arrays, barriers, and copies under way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class Reference:
    """A reference to a region of an array. The region may reach beyond the end of the array."""

    def __init__(self, array: np.ndarray, starts: tuple, sizes: tuple, kept: tuple):
        self.array, self.starts, self.sizes, self.kept = array, starts, sizes, kept

    @classmethod
    def to(cls, array: np.ndarray) -> Reference:
        """Returns the reference to all of an array."""
        return cls(array, (0,) * array.ndim, array.shape, tuple(range(array.ndim)))

    @property
    def at(self) -> Any:
        return _At(self)

    def region(self, index: Any) -> Reference:
        starts, sizes, kept = list(self.starts), list(self.sizes), []
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.kept) - len(index))
        for dimension, part in zip(self.kept, index, strict=True):
            if isinstance(part, slice):
                begin = part.start or 0
                end = sizes[dimension] if part.stop is None else part.stop
                kept.append(dimension)
            else:
                begin, end = part, part + 1
            starts[dimension] += begin
            sizes[dimension] = end - begin
        return Reference(self.array, tuple(starts), tuple(sizes), tuple(kept))

    def transpose(self, order: tuple[int, ...]) -> Reference:
        kept = tuple(self.kept[dimension] for dimension in order)
        return Reference(self.array, self.starts, self.sizes, kept)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[dimension] for dimension in self.kept)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def is_within(self) -> bool:
        """Returns whether the region ends within the array."""
        ends = (start + size for start, size in zip(self.starts, self.sizes, strict=True))
        return all(end <= size for end, size in zip(ends, self.array.shape, strict=True))

    def is_one_piece(self) -> bool:
        """Returns whether the region is contiguous, and aligned for a plain bulk copy.

        Such a copy moves 16 bytes at a time. Elements have 2 bytes, as on GPUs.
        """
        if not self.is_within():
            return False
        sizes = zip(self.sizes, self.array.shape, strict=True)
        inner = itertools.islice(itertools.dropwhile(lambda pair: pair[0] == 1, sizes), 1, None)
        start = np.ravel_multi_index(self.starts, self.array.shape)
        return all(size == end for size, end in inner) and (
            start % 8 == math.prod(self.sizes) % 8 == 0
        )

    def _within(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Returns the part of the region in the array, as slices of the array and of the region."""
        bounds = [
            (start, max(start, min(start + size, end)))
            for start, size, end in zip(self.starts, self.sizes, self.array.shape, strict=True)
        ]
        assert all(start >= 0 for start in self.starts)
        there = tuple(slice(*bound) for bound in bounds)
        return there, tuple(slice(0, end - start) for start, end in bounds)

    def read(self) -> np.ndarray:
        """Returns the value of the region, with zeros beyond the end of the array."""
        value = np.zeros(self.sizes, self.dtype)
        there, here = self._within()
        value[here] = self.array[there]
        dropped = tuple(d for d in range(value.ndim) if d not in self.kept)
        order = np.argsort(np.argsort(self.kept))
        return np.squeeze(value, dropped).transpose(order)

    def write(self, value: np.ndarray) -> None:
        """Writes the part of the region that is in the array."""
        dropped = tuple(d for d in range(self.array.ndim) if d not in self.kept)
        there, here = self._within()
        self.array[there] = np.expand_dims(value, dropped)[here]

    def __getitem__(self, index: Any) -> np.ndarray:
        return (self if index is ... else self.region(index)).read()

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        (self if index is ... else self.region(index)).write(value)


class RawReference(Reference):
    """A raw view of swizzled shared memory; elements have 2 bytes, as on GPUs.

    Groups of 8 rows are divided into tiles that are `swizzle` bytes wide. In a tile, units of 16
    bytes change places within their row: bits 7 to 9 of the address are XORed into bits 4 to 6.
    """

    swizzle: int

    @classmethod
    def view(cls, tiles: Reference, swizzle: int) -> RawReference:
        raw = cls(tiles.array, tiles.starts, tiles.sizes, tiles.kept)
        raw.swizzle = swizzle
        return raw

    def region(self, index: Any) -> RawReference:
        return RawReference.view(super().region(index), self.swizzle)

    def _order(self) -> np.ndarray:
        """Returns which element of a group of rows is stored at each place of its memory."""
        width = self.array.shape[-1]
        assert self.starts[-2] % 8 == self.sizes[-2] % 8 == 0 and self.sizes[-1] == width
        address = np.arange(8 * width) * 2
        tile, row = address // (8 * self.swizzle), address // self.swizzle % 8
        column = (address ^ (address // 128 % 8 * 16)) % self.swizzle
        return row * width + (tile * self.swizzle + column) // 2

    def read(self) -> np.ndarray:
        value = super().read()
        order = self._order()
        return value.reshape(-1, order.size)[:, order].reshape(value.shape)

    def write(self, value: np.ndarray) -> None:
        order = self._order()
        super().write(value.reshape(-1, order.size)[:, np.argsort(order)].reshape(value.shape))


class Barriers:
    """Barriers in shared memory. The blocks of a cluster have one object in common."""

    def __init__(self, count: int, num_arrivals: int = 1):
        self.num_arrivals = num_arrivals
        self.arrivals = [0] * count
        # How often each actor has waited for each barrier.
        self.waits: dict[tuple[Any, int], int] = {}

    @property
    def at(self) -> Any:
        return _At(self)

    def region(self, index: int) -> tuple[Barriers, int]:
        return self, index


class _At:
    def __init__(self, memory: Reference | Barriers):
        self.memory = memory

    def __getitem__(self, index: Any) -> Any:
        return self.memory.region(index)


@dataclass(eq=False)
class Copy:
    """A copy under way: it reads its source first, and writes its destination later."""

    source: Reference
    destination: Reference
    arrive: Callable[[], None] = lambda: None
    value: np.ndarray | None = None
    written: bool = False

    def advance(self) -> None:
        if self.value is None:
            self.value = self.source.read()
        else:
            self.destination.write(self.value)
            self.written = True
            self.arrive()
