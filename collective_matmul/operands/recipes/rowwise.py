"""Row-wise: a scale for each row of x and each column of w."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.operands.scaled import stack_kernels
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from collective_matmul.operands.scaled.scaling import Array


@dataclass(frozen=True)
class Rowwise(Recipe):
    """Scales of rows and columns, which are in one program of a kernel as a whole."""

    def stacks(
        self, ws: Sequence[Array], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[ScaledMatrix, ...]:
        """Stacks of scaled matrices; see `Format`."""
        alone = transposed or len(ws) == 1
        if sharding is not None or not alone or not stack_kernels.can_convert(ws):
            return super().stacks(ws, transposed=transposed, sharding=sharding)
        scale = functools.partial(self.scale, dtype=self.dtype)
        if transposed:
            values, scales = stack_kernels.in_rows(ws, scale, self.dtype)
            return tuple(ScaledMatrix(each, scales, ws[0].dtype) for each in values)
        return (ScaledMatrix(*stack_kernels.in_columns(ws[0], scale, self.dtype), ws[0].dtype),)


ROWWISE = Rowwise("rowwise")
