"""Launches of the grouped matmul: rows in groups, each times a matrix of its own.

Legend: M sorted rows, S rows of an array that is read by index, G groups, K contracted, N columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.grouped_matmul.gradient_kernel import GroupedOuterGemm, fills
from collective_matmul.mosaic_gpu.grouped_matmul.group_tiles import group_bounds, group_tiles
from collective_matmul.mosaic_gpu.grouped_matmul.product_kernel import GroupedGemm
from collective_matmul.mosaic_gpu.grouped_matmul.scaled_product_kernel import ScaledGroupedGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling


class GroupScales(NamedTuple):
    """Scales of operands in 8 bits.

    Attributes:
      rows: float32 [M, 1], the scale of each sorted row; or [M, K / 128], of the numbers of its
        k-blocks, those of all terms of a sum side by side.
      columns: float32 [G, N] for each result, of the columns of the groups' matrices, the same for
        all terms; or [G, N / 128, K / 128], of their blocks, those of all terms side by side.
    """

    rows: jax.Array
    columns: Sequence[jax.Array]


def grouped_matmuls(
    xs: Sequence[jax.Array],
    ws: Sequence[Sequence[jax.Array]],
    sizes: jax.Array,
    tiling: Tiling,
    target: Target,
    *,
    index: jax.Array | None = None,
    transposed: bool = False,
    columns: tuple[int, int] | None = None,
    scales: GroupScales | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, ...]:
    """The rows of each group times the group's matrix, for several results in one kernel.

    Args:
      xs: one array for each term of a sum, [M, K_p], or [S, K_p] if `index` is given. Rows in 8
        bits may be longer than K_p, which the matrices have.
      ws: ``ws[p][q]`` multiplies xs[p] in result q: [G, K_p, N], or [G, N, K_p] if `transposed`.
      sizes: int32 [G], the number of rows of each group, in order.
      tiling: how the matmul is tiled.
      target: the GPU to build for.
      index: int32 [M], the row of each x for each sorted row.
      transposed: whether the matrices are stored transposed.
      columns: the first column of the results, and the end: one of equal blocks; None: all.
      scales: of operands in 8 bits, which have transposed matrices; their `columns` are those of
        the results.
      dtype: of the results, half precision; None: that of the xs.

    Returns:
      [M, N], or those columns, for each q. Rows of no group may have any value.
    """
    assert transposed or scales is None
    launch = _launch(tiling, target, transposed, columns, jnp.dtype(dtype or xs[0].dtype))
    of_tiles = () if scales is None else _scales_of_tiles(scales, tiling)
    return launch(tuple(xs), tuple(map(tuple, ws)), sizes, index, of_tiles)


def _scales_of_tiles(scales: GroupScales, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """Scales as `ScaledGroupedGemm` has them, of whole tiles: it loads them without a check."""

    def padded(array: jax.Array, dimension: int, added: int) -> jax.Array:
        widths = [(0, 0)] * array.ndim
        widths[dimension] = (0, added)
        return jnp.pad(array, widths)

    # Tiles begin anywhere, and the last one may begin with the last rows.
    rows = padded(scales.rows.T[:, :, None], 1, tiling.tile_m * tiling.cluster[0])
    width = tiling.tile_n * tiling.cluster[1] // (BLOCK if scales.columns[0].ndim == 3 else 1)
    columns = [padded(each, 1, -each.shape[1] % width) for each in scales.columns]
    return rows, jnp.concatenate(columns, 1)


@functools.cache
def _launch(
    tiling: Tiling,
    target: Target,
    transposed: bool,
    columns: tuple[int, int] | None,
    dtype: Any,
) -> Any:
    """Returns one function for all equal launches: they are traced and compiled once."""

    @sequential_vmap
    def launch(
        xs: Any, ws: Any, sizes: Any, index: Any, scales: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        rows = len(xs[0] if index is None else index)
        axes = frozenset().union(
            *map(varying_axes, jax.tree.leaves((xs, ws, sizes, index, scales)))
        )
        first, end = columns or (0, ws[0][0].shape[1 if transposed else 2])
        x_operands = [Operand(x[None], 2) for x in xs]
        w_operands = [
            [_matrices(w, first, end - first, transposed=transposed) for w in term] for term in ws
        ]
        outs = [vary_over(lax.empty((1, rows, end - first), dtype), axes) for _ in ws[0]]
        options = {"indexed": index is not None, "interpreted": target.interpret is not False}
        kind = GroupedGemm
        if scales:
            kind = functools.partial(ScaledGroupedGemm, in_blocks=scales[1].ndim == 3)
        gemm = kind(x_operands, w_operands, outs, tiling, **options)
        tiles = group_tiles(sizes, rows, tiling.tile_m * tiling.cluster[0])
        kernel = gemm.kernel(
            outs,
            "grouped_matmul",
            target.multiprocessors,
            target.interpret,
            writes_all=gemm.writes_all,
        )
        operands = [*x_operands, *(w for term in w_operands for w in term)]
        # Of all operands and the results: the first plane, and the block of columns.
        indices = [*(o.index for o in operands), 0, *(o.column_block for o in operands), 0]
        rows_read = [] if index is None else [index]
        results = kernel(
            jnp.asarray(indices, jnp.int32),
            *scales,
            *tiles,
            *rows_read,
            *(o.array for o in operands),
        )
        return tuple(result[0] for result in results)

    return jax.jit(launch)


def _matrices(w: jax.Array, first: int, width: int, *, transposed: bool) -> Operand:
    """The matrices of all groups, of which the results have `width` columns from `first` on."""
    groups, *shape = w.shape
    count = shape[0 if transposed else 1] // width
    if not transposed:
        block = {} if count == 1 else {"column_block": first // width, "column_blocks": count}
        return Operand(w, 1, per_batch=1, **block)
    # Blocks of rows are planes too.
    planes = w.reshape(groups * count, width, shape[1])
    return Operand(planes, 2, first // width, per_batch=count)


class OuterPart(NamedTuple):
    """Rows whose products are added: see `grouped_outer`.

    Attributes:
      left: [M, K], or [S, K] with `left_index`.
      right: [M, N], or [S, N] with `right_index`.
      sizes: int32 [G], the number of rows of each group, in order.
      left_index: int32 [M], or None.
      right_index: int32 [M], or None.
    """

    left: Any
    right: Any
    sizes: Any
    left_index: Any = None
    right_index: Any = None


def grouped_outer(
    parts: Sequence[OuterPart],
    tiling: Tiling,
    target: Target,
    added_to: jax.Array | None = None,
) -> jax.Array:
    """The sum of ``leftᵀ right`` over the rows of each group, of all parts: [G, K, N].

    Args:
      parts: at least one; all have the same groups, K and N. Of all of them the lefts come by
        index, or the rights, or neither.
      tiling: how the matmul is tiled.
      target: the GPU to build for.
      added_to: [G, K, N], added in float32 before the only rounding, and overwritten if nothing
        else reads it. Tiles must fill it: see `fills`.
    """
    assert added_to is None or fills(tiling, *added_to.shape[1:])
    return _launch_outer(tiling, target)(tuple(parts), added_to)


@functools.cache
def _launch_outer(tiling: Tiling, target: Target) -> Any:
    """Returns one function for all equal launches: they are traced and compiled once."""

    @sequential_vmap
    def launch(parts: tuple[OuterPart, ...], added_to: jax.Array | None) -> jax.Array:
        first = parts[0]
        axes = frozenset().union(*map(varying_axes, jax.tree.leaves((parts, added_to))))
        shape = (first.sizes.size, first.left.shape[1], first.right.shape[1])
        out = lax.empty(shape, first.left.dtype) if added_to is None else added_to
        out = vary_over(out, axes)
        lefts, rights = [part.left[None] for part in parts], [part.right[None] for part in parts]
        gemm = GroupedOuterGemm(
            lefts,
            rights,
            out,
            tiling,
            left_indexed=first.left_index is not None,
            right_indexed=first.right_index is not None,
            adds=added_to is not None,
            interpreted=target.interpret is not False,
        )
        kernel = gemm.kernel(
            [out],
            "grouped_outer",
            target.multiprocessors,
            target.interpret,
            writes_all=gemm.writes_all,
        )
        indexes = [i for part in parts for i in part[3:] if i is not None]
        bounds = [group_bounds(part.sizes) for part in parts]
        # Of all operands and the result: the first plane, and the block of columns.
        indices = jnp.zeros((2 * (2 * len(parts) + 1),), jnp.int32)
        (result,) = kernel(indices, *bounds, *indexes, *lefts, *rights)
        return result

    return jax.jit(launch)
