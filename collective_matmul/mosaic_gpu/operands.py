"""The operands of a matmul: which planes of an array it reads, and which k-blocks of a plane.

Arrays are planes ``[planes, rows, columns]``, one plane for each chunk. So TMA clips a tile at the
end of its own chunk if the rows do not fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar


class Operand(NamedTuple):
    """An array of planes, and which of them a matmul reads.

    Batch b of the result is the sum over c of products of planes
    ``index + b * per_batch + c * per_contracted``.

    Attributes:
      array: [planes, rows, columns]; None in the kernel, which has a reference instead.
      contracted: the axis that is summed over within a plane.
      index: the first plane; in the kernel, where `indices` has it.
      per_batch: planes from one batch to the next.
      per_contracted: planes from one contracted plane to the next.
    """

    array: Any
    contracted: Literal[1, 2]
    index: Any = 0
    per_batch: int = 0
    per_contracted: int = 0

    @property
    def free(self) -> int:
        """The axis of a plane that the result has too."""
        return 3 - self.contracted


def reader(
    ref: Ref, operand: Operand, indices: Ref, batch: Scalar, free: Any
) -> Callable[[Scalar, Any], Ref]:
    """Returns ``read(c, k_range)``, which returns the reference to a k-block of an operand.

    Args:
      ref: the reference to the operand's array.
      operand: which of its planes to read.
      indices: first planes of all operands.
      batch: of the result.
      free: the range of rows, or columns, of the result's tile.
    """
    first = indices[operand.index] + batch * operand.per_batch

    def read(contracted_plane: Scalar, k_range: Any) -> Ref:
        plane = first + contracted_plane * operand.per_contracted
        if operand.contracted == 1:
            return ref.at[plane, k_range, free]
        return ref.at[plane, free, k_range]

    return read
