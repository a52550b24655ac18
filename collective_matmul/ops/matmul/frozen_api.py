"""The ops of `collective_matmul.ops.matmul.frozen` with checked arguments.

Arguments have the meanings and are refused as those of `collective_matmul.ops.matmul.api`. Weights
have no gradient: nothing computes one, or keeps or gathers what it would contract. Columns are
arrays of x's dtype that travel in the same collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.api import named, split_columns
from collective_matmul.ops.matmul.call import call_here
from collective_matmul.ops.matmul.checks import Implementation, RecipeName
from collective_matmul.ops.matmul.frozen import (
    Columns,
    gather_matmul_frozen,
    has_one_matrix,
    matmul_all_reduce_frozen,
    matmul_scatter_frozen,
)
from collective_matmul.ops.matmul.prequantize import checked_weights, operands_of


def all_gather_matmul_frozen(
    x: jax.Array,
    columns: Columns,
    ws: Sequence[jax.Array | Quantized],
    axis_name: str,
    *,
    gather_dimension: int = 0,
    shards: WeightShards | None = None,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> tuple[tuple[jax.Array, ...], Columns]:
    """``all_gather(x) @ w`` for each w, and the gathered columns.

    Args:
      x: [..., m, ..., K].
      columns: each [..., m, ..., r].
      ws: each [K, *N], frozen.
      axis_name: the mesh axis to gather over.
      gather_dimension: the dimension of x and columns that is sharded.
      shards: how a second axis shards the weights, or None.
      fp8: the recipe, or None.
      implementation: as the ops take it.

    Returns:
      For each w [..., D*m, ..., *N]; and for each of the columns [..., D*m, ..., r].
    """
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    ws = _checked(x, ws, recipe, shards)
    dimension = checks.dimension("gather_dimension", gather_dimension, x)
    operands = _varying(axis_name, shards, x, columns, operands_of(ws, recipe, shards))
    ys, gathered = gather_matmul_frozen(*operands, call_here(axis_name, dimension, requested))
    ys = tuple(named(split_columns(y, w, shards)) for y, w in zip(ys, ws, strict=True))
    return ys, tuple(map(named, gathered))


def matmul_reduce_scatter_frozen(
    x: jax.Array,
    columns: Columns,
    w: jax.Array | Quantized,
    axis_name: str,
    *,
    scatter_dimension: int | None = 0,
    shards: WeightShards | None = None,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Columns]:
    """``reduce_scatter(x @ w)``, and the columns, summed and scattered too.

    Args:
      x: [..., M, ..., k].
      columns: each [..., M, ..., r].
      w: [k, *N], frozen.
      axis_name: the mesh axis to sum over.
      scatter_dimension: the dimension of x and columns to scatter; None for an all-reduce.
      shards: how a second axis shards the weight, or None.
      fp8: the recipe, or None.
      implementation: as the ops take it.

    Returns:
      [..., M/D, ..., *N]; and for each of the columns [..., M/D, ..., r].
    """
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    (w,) = _checked(x, (w,), recipe, shards)
    op, dimension = matmul_all_reduce_frozen, None
    if scatter_dimension is not None:
        op = matmul_scatter_frozen
        dimension = checks.dimension("scatter_dimension", scatter_dimension, x)
        checks.divisible("scatter_dimension", dimension, x, axis_name)
    operands = _varying(axis_name, shards, (x,), columns, operands_of((w,), recipe, shards))
    y, sums = op(*operands, call_here(axis_name, dimension, requested))
    return named(split_columns(y, w, shards)), tuple(map(named, sums))


def _checked(x: Any, ws: Any, recipe: Any, shards: WeightShards | None) -> tuple[Any, ...]:
    ws = tuple(ws)
    if all(map(has_one_matrix, ws)):
        for w in ws:  # Quantized one by one: scales in common are needed by sums alone.
            if w.fp8 != recipe or w.dtype != x.dtype:
                raise ValueError(
                    f"w: frozen in {w.fp8!r} for products in {w.dtype}; expected fp8={recipe!r} and"
                    f" {x.dtype}, the dtype of x; quantize it so"
                )
        checks.operands(x, ws, shards, recipe)
        return ws
    ws = checked_weights(tuple(map(lax.stop_gradient, ws)), recipe, shards, x)
    checks.operands(x, ws, shards, recipe)
    return ws


def _varying(axis_name: str, shards: WeightShards | None, *operands: Any) -> Any:
    operands = pvary_all(axis_name, operands)
    return operands if shards is None else pvary_all(shards.axis_name, operands)
