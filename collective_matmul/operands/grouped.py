"""Operands of grouped matmuls in a format: rows that are converted one by one, and stacks.

In a grouped matmul, each group of rows has a matrix of its own, and which rows are a group is known
when the program runs. So a row must not depend on others, nor a matrix: to the format each of them
is an array by itself. A row is then the same wherever it is converted, before it travels or after,
and whichever rows are beside it.

Legend: M rows, K contracted, G groups, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.operands.format import PLAIN, Format
from collective_matmul.operands.multiply import is_array, multiplied

#: An array, or rows or a stack of matrices in a format.
GroupedOperand = Any


def separate_rows(
    stored: Format, xs: Sequence[Any], *, of_gradient: bool = False
) -> tuple[Any, ...]:
    """Rows [M, K_i] in a format, each converted by itself; as `Format.rows`.

    Args:
      stored: the format.
      xs: arrays [M, K_i], operands of one sum of products. Rows in the format stay what they are.
      of_gradient: whether they are gradients of results.
    """
    if stored == PLAIN or not all(map(is_array, xs)):
        return tuple(xs)
    return jax.vmap(lambda *rows: tuple(stored.rows(rows, of_gradient=of_gradient)))(*xs)


@dataclass(frozen=True)
class Conversion:
    """How arrays become operands of one sum of products.

    Attributes:
      format: the format in which they are multiplied.
      count: how many of the arrays are operands; others follow them.
      of_gradient: whether they are gradients of results.
      keeps_arrays: whether the operands are also needed as arrays.
    """

    format: Format
    count: int
    of_gradient: bool = False
    keeps_arrays: bool = False

    def kept(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays that are needed as such, or values for them."""
        return arrays if self.keeps_arrays else arrays[self.count :]

    def operands(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """The operands, of all arrays."""
        rows = separate_rows(self.format, arrays[: self.count], of_gradient=self.of_gradient)
        return [*map(multiplied, rows)]


def matrix_stacks(
    stored: Format, ws: Sequence[Any], *, transposed: bool = False, sharding: Any = None
) -> tuple[Any, ...]:
    """Weights [G, K_i, N] in a format, each matrix converted by itself; as `Format.matrices`.

    Args:
      stored: the format.
      ws: arrays, operands of one sum of products.
      transposed: whether the results are [G, N, K_i]. Plain arrays stay as they are.
      sharding: the `WeightShards` of shards of each matrix, as of [K, N]; or None.
    """
    if stored == PLAIN:
        return tuple(ws)
    return stored.stacks(ws, transposed=transposed, sharding=sharding)


def as_array(operand: GroupedOperand, dtype: Any) -> jax.Array:
    """The numbers [M, K] or [G, K, N] that rows or a stack stand for, rounded to `dtype`.

    A number that only rounding makes infinite becomes the largest finite one.
    """
    if is_array(operand):
        return operand
    # XLA drops a rounding to 8 bits whose result is widened in the same program.
    operand = lax.optimization_barrier(operand)
    wide = jax.vmap(lambda each: each.dequantized())(operand)
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(wide), jnp.clip(wide, -largest, largest), wide).astype(dtype)
