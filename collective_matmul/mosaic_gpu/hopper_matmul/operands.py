"""The operands of a matmul: which planes of an array it reads, and which k-blocks of a plane.

Arrays are planes ``[planes, rows, columns]``, one plane for each chunk. So TMA clips a tile at the
end of its own chunk if the rows do not fill it. The columns of an array may be divided into equal
blocks, of which a matmul reads or writes one. There TMA clips nothing: tiles have to fill a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jax.experimental import pallas as pl

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
      column_block: the block of columns to read; in the kernel, where `indices` has it.
      column_blocks: number of blocks that the columns are divided into.
    """

    array: Any
    contracted: Literal[1, 2]
    index: Any = 0
    per_batch: int = 0
    per_contracted: int = 0
    column_block: Any = 0
    column_blocks: int = 1

    @property
    def free(self) -> int:
        """The axis of a plane that the result has too."""
        return 3 - self.contracted

    def size(self, axis: int) -> int:
        """The size of an axis of a plane, of its block of columns if it is divided."""
        return self.array.shape[axis] // (self.column_blocks if axis == 2 else 1)


def reader(
    ref: Ref, operand: Operand, indices: Ref, batch: Scalar, free: Any
) -> Callable[[Scalar, Any], Ref]:
    """Returns ``read(c, k_range)``, which returns the reference to a k-block of an operand.

    Args:
      ref: the reference to the operand's array.
      operand: which of its planes to read.
      indices: first planes of all operands, and blocks of columns.
      batch: of the result.
      free: the range of rows, or columns, of the result's tile.
    """
    first = indices[operand.index] + batch * operand.per_batch

    def of_block(columns: Any) -> Any:
        if operand.column_blocks == 1:
            return columns
        width = ref.shape[2] // operand.column_blocks
        return pl.ds(indices[operand.column_block] * width + columns.start, columns.size)

    def read(contracted_plane: Scalar, k_range: Any) -> Ref:
        plane = first + contracted_plane * operand.per_contracted
        if operand.contracted == 1:
            return ref.at[plane, k_range, of_block(free)]
        return ref.at[plane, free, of_block(k_range)]

    return read
