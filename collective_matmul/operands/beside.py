"""Columns that travel beside an operand, in the collective that the operand travels in.

An adapter's product has few columns, and would need a collective of its own. As part of an operand
it has none: rows are a pytree, which a schedule cuts and sends without knowing what it is::

    gather   (x, e) -> all_gather(x) @ w  and  all_gather(e)
    scatter  (x, e) -> reduce_scatter(x @ w)  and  reduce_scatter(e)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.arithmetic import add
from collective_matmul.operands.chunked import Chunked, read
from collective_matmul.operands.multiply import is_array, matmul, multiply_chunks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsBeside:
    """Rows of operands, and further columns that travel with them.

    Attributes:
      rows: the operands [..., K_i], each an array or rows in a format.
      columns: arrays [..., r].
    """

    rows: tuple[Any, ...]
    columns: tuple[jax.Array, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return jax.tree.leaves(self.rows)[0].ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first array."""
        return jax.tree.leaves(self.rows)[0].shape

    @property
    def dtype(self) -> Any:
        """The dtype of the columns, which is that of products."""
        return self.columns[0].dtype

    @property
    def without_array(self) -> RowsBeside:
        """These rows themselves: nothing else contracts them."""
        return self

    @property
    def array(self) -> None:
        """None: see `without_array`."""
        return


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightsBeside:
    """Weights that multiply `RowsBeside`.

    Attributes:
      weights: one for each of the rows, in their format; arrays may be transposed.
      transpose_w: whether arrays are [N, K].
      returns_columns: whether the product is a pair: the sum of products, and the further columns.
    """

    weights: tuple[Any, ...]
    transpose_w: bool = field(metadata={"static": True})
    returns_columns: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of the first weight."""
        rows, columns = self.weights[0].shape
        turned = self.transpose_w and is_array(self.weights[0])
        return (columns, rows) if turned else (rows, columns)

    @property
    def product_dtype(self) -> Any:
        """The dtype of products."""
        first = self.weights[0]
        return first.dtype if is_array(first) else first.product_dtype

    def multiply(self, rows: RowsBeside) -> Any:
        """The sum of the products [..., N]; with the further columns if they are returned."""
        pairs = zip(rows.rows, self.weights, strict=True)
        y = add(*(matmul(x, w, self.transpose_w) for x, w in pairs))
        return (y, rows.columns) if self.returns_columns else y

    @staticmethod
    def multiply_chunks(
        xs: Sequence[Rows], ws: Sequence[Sequence[Any]], outs: Sequence[Rows], *, dimension: int
    ) -> tuple[Any, ...] | None:
        """Multiplies chunks in place where their format can; returns pairs where asked to.

        See `collective_matmul.operands.multiply.multiply_chunks`.
        """
        (x,), (weights,) = xs, ws
        operands = [x._replace(array=each) for each in x.array.rows]
        terms = [[w.weights[i] for w in weights] for i in range(len(operands))]
        turned = weights[0].transpose_w
        ys = multiply_chunks(operands, terms, outs, dimension=dimension, transpose_w=turned)
        if not weights[0].returns_columns:
            return ys
        return tuple((y, read(x._replace(array=x.array.columns), dimension)) for y in ys)


def columns_beside(gathered: Any, dimension: int) -> tuple[jax.Array, ...]:
    """The further columns of gathered `RowsBeside`, whole."""
    if not isinstance(gathered, Chunked):
        return gathered.columns
    chunks = [chunk.columns for chunk in gathered.chunks]
    return Chunked(chunks, gathered.starts).whole(dimension)
