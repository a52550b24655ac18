"""What a matmul reads: planes of arrays, and slices of planes.

Arrays are planes ``[planes, rows, columns]``, one plane to a chunk, so that the copy engine clips a
tile at the end of its own chunk where the rows do not fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Operand(NamedTuple):
    """Planes [planes, rows, columns], and which of them a matmul reads.

    Plane ``index + b * per_batch + c * per_contracted`` takes part in batch b of the result and in
    plane c of the contraction. `contracted` is the axis summed over within a plane.
    """

    array: Any
    contracted: Literal[1, 2]
    index: Any = 0
    per_batch: int = 0
    per_contracted: int = 0

    @property
    def free(self) -> int:
        """The axis of a plane that the result keeps."""
        return 3 - self.contracted


def reader(ref, operand: Operand, indices, batch, free) -> Callable:
    """A function that gives the slice of an operand at (contracted plane, contracted range)."""
    first = indices[operand.index] + batch * operand.per_batch

    def read(contracted_plane, along):
        plane = first + contracted_plane * operand.per_contracted
        return ref.at[plane, along, free] if operand.contracted == 1 else ref.at[plane, free, along]

    return read
