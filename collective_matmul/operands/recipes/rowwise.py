"""Row-wise: a scale for each row of x and each column of w."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
        if sharding is not None or not (transposed or len(ws) == 1):
            return super().stacks(ws, transposed=transposed, sharding=sharding)

        @jax.custom_batching.custom_vmap
        def stacks(*ws: jax.Array) -> tuple[ScaledMatrix, ...]:
            return self._whole_stacks(ws, transposed)

        @stacks.def_vmap
        def _(layers: int, has_layers: Sequence[bool], *ws: jax.Array) -> Any:
            """Layers are further matrices of the stacks, so that `can_convert` sees all numbers."""
            pairs = zip(ws, has_layers, strict=True)
            whole = [w if has else jnp.broadcast_to(w, (layers, *w.shape)) for w, has in pairs]
            made = stacks(*(w.reshape(-1, *w.shape[2:]) for w in whole))
            divided = jax.tree.map(lambda leaf: leaf.reshape(layers, -1, *leaf.shape[1:]), made)
            return divided, jax.tree.map(lambda _: True, made)

        return stacks(*map(jnp.asarray, ws))

    def _whole_stacks(self, ws: Sequence[jax.Array], transposed: bool) -> tuple[ScaledMatrix, ...]:
        """Stacks of matrices whose scales are found here."""
        if not stack_kernels.can_convert(ws):
            return super().stacks(ws, transposed=transposed)
        scale = functools.partial(self.scale, dtype=self.dtype)
        if transposed:
            values, scales = stack_kernels.in_rows(ws, scale, self.dtype)
            return tuple(ScaledMatrix(each, scales, ws[0].dtype) for each in values)
        return (ScaledMatrix(*stack_kernels.in_columns(ws[0], scale, self.dtype), ws[0].dtype),)


ROWWISE = Rowwise("rowwise")
