"""The contract between expert ops and what multiplies groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul.dispatch.contract import Backend
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.operands.grouped import Conversion, GroupedOperand, as_array
from collective_matmul.ops.experts.grouped.request import GroupedRequest


class GroupedBackend(Backend, Protocol):
    """A way to multiply groups of rows.

    Rows are sorted by group. Groups have `sizes` rows each, and further rows belong to none:
    results for these may have any value.

    Operands of the methods are what `operand` returns of rows and matrices in a format: arrays,
    unless a backend multiplies the format itself.
    """

    def operand(self, request: GroupedRequest, stored: GroupedOperand) -> GroupedOperand:
        """Rows [M, K], or a stack of matrices [G, K, N], as the other methods take them.

        It is called once for a pass or a visit, before the products.

        Args:
          request: the product.
          stored: an array, or the operand in the format of the request: see
            `collective_matmul.operands.grouped`.

        Returns:
          The numbers that it stands for, in the dtype of the request. A backend that multiplies 8
          bits overrides this.
        """
        return as_array(stored, request.dtype)

    def multiplied_dtypes(self, request: GroupedRequest) -> tuple[str, str] | None:
        """The dtypes of what `operand` returns."""
        return np.dtype(request.dtype).name, np.dtype(request.dtype).name

    def matmul(
        self,
        request: GroupedRequest,
        pairs: Sequence[tuple[GroupedOperand, GroupedOperand]],
        sizes: jax.Array,
        index: jax.Array | None = None,
        columns: tuple[int, int] | None = None,
    ) -> jax.Array:
        """The sum over pairs (x, w) of the rows of each group times its matrix.

        Args:
          request: the shapes.
          pairs: x [M, K], or any number of rows with `index`; w [G, K, N], or [G, N, K] if
            `request.transposed`.
          sizes: int32 [G].
          index: int32 [M], the row of x for each sorted row.
          columns: the first column of the result, and the end; None: all.

        Returns:
          [M, N], or those columns.
        """
        ...

    def matmuls(
        self,
        request: GroupedRequest,
        x: GroupedOperand,
        ws: Sequence[GroupedOperand],
        sizes: jax.Array,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """The rows of each group times its matrix, for each of several weights; as `matmul`."""
        return tuple(self.matmul(request, [(x, w)], sizes, index) for w in ws)

    def weight_gradient(
        self,
        request: GroupedRequest,
        parts: Sequence[OuterPart],
        added_to: jax.Array | None = None,
    ) -> jax.Array:
        """``leftᵀ right`` over the rows of each group, the sum of all parts: [G, K, N].

        Args:
          request: the shapes.
          parts: the rows.
          added_to: [G, K, N], added too.
        """
        ...

    def contracted_rows(
        self, request: GroupedRequest, x: jax.Array, index: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """How a weight gradient reads rows of x by index best.

        Args:
          request: the weight gradient.
          x: [S, K].
          index: int32 [M].
          count: int32 scalar, the number of rows that belong to groups.

        Returns:
          x and the index; or a copy of the rows, [M, K], and None.
        """
        del request, count
        return x, index

    def sum_rows(
        self,
        rows: jax.Array,
        places: jax.Array,
        count: jax.Array,
        weights: jax.Array | None,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """Each token's sum of its rows, in the order of its choices, added in at least float32.

        Args:
          rows: [M, N]; those that no token has may have any value.
          places: int32 [T, k], the row of each choice.
          count: int32 scalar; places from here on have no row.
          weights: [T, k], the factors of the rows; None: they are added as they are.
          dtype: of the result.

        Returns:
          [T, N].
        """
        is_there, total = places < count, None
        places = jnp.where(is_there, places, 0)
        for j in range(places.shape[1]):
            term = rows[places[:, j]].astype(accumulator(dtype))
            if weights is not None:
                term = term * weights[:, j, None].astype(term.dtype)
            term = jnp.where(is_there[:, j, None], term, 0)
            total = term if total is None else total + term
        assert total is not None
        return total.astype(dtype)

    def map_rows(
        self,
        fun: Callable[..., tuple[Sequence[jax.Array], jax.Array | None]],
        arrays: Sequence[jax.Array],
        row_values: Sequence[jax.Array],
        count: jax.Array,
        *,
        results: int,
        row_sums: bool = False,
        conversion: Conversion | None = None,
    ) -> tuple[GroupedOperand, ...]:
        """A function of the elements of arrays, computed in at least float32.

        Args:
          fun: ``fun(*arrays, *row_values)`` returns arrays, and what is summed along columns, or
            None.
          arrays: [M, N], of one dtype.
          row_values: [M], in the dtype that is computed in; `fun` has them as [M, 1].
          count: int32 scalar: results of later rows may have any value.
          results: number of arrays that `fun` returns.
          row_sums: whether it returns something to sum.
          conversion: which results become operands of a product, and how. They are rounded to the
            dtype of the arrays before.

        Returns:
          The results, each [M, N] in the dtype of the arrays, but those that only the `conversion`
          needs; and, with `row_sums`, [M]; and the operands that the conversion makes.
        """
        del count, results, row_sums
        dtype = arrays[0].dtype
        wide = accumulator(dtype)
        made, summed = fun(
            *(array.astype(wide) for array in arrays),
            *(value[:, None].astype(wide) for value in row_values),
        )
        narrow = tuple(array.astype(dtype) for array in made)
        sums = () if summed is None else (summed.sum(1),)
        if conversion is None:
            return (*narrow, *sums)
        return (*conversion.kept(narrow), *sums, *conversion.operands(narrow))
