"""Matmuls of chunks of packed rows, in place: what `chunk_matmul` is for operands in 8 bits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from collective_matmul._compat import (
    MULTIPLIES_MIXED_FP8,
    partly_automatic,
    vary_over,
    varying_axes,
)
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import (
    Rows,
    chunk_count,
    chunk_index,
    planes_of,
)
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK, ScaledGemm
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE, Tiling
from collective_matmul.operands.scaled.packed_rows import PackedRows

#: A `ScaledMatrix`; its module imports this one.
ScaledMatrix = Any

#: By measurements on an H200: two blocks that multicast w gain up to 5 % with scales of rows, and
#: nothing with those of blocks. Tiles of 128 columns fill waves better where there are few tiles.
_TILINGS = (
    Tiling(128, 256, tile_k=128, max_concurrent_steps=4, cluster_dimension="m"),
    Tiling(128, 128, tile_k=128, max_concurrent_steps=6, cluster_dimension="m"),
)
_TILING_OF_BLOCKS = Tiling(128, 128, tile_k=128, max_concurrent_steps=5, cluster_dimension=None)
#: The relative speed of tiles of 128 columns.
_NARROW_SPEED = 0.96


@dataclass(frozen=True)
class ScaledProblem:
    """The shapes of one launch: see `MatmulProblem` in `mosaic_gpu.hopper_matmul.tiling`.

    Attributes:
      batch: planes of each result.
      m: rows of each result.
      k: for each term of the sum, the size contracted.
      n: the columns of each result.
      in_blocks: whether blocks have the scales; else rows and columns have them.
    """

    batch: int
    m: int
    k: tuple[int, ...]
    n: tuple[int, ...]
    in_blocks: bool

    def unsupported_reason(self) -> str | None:
        """Why the kernel cannot multiply these shapes; None if it can.

        Behind the last k-block of a row there are scales, which no k-block may contain.
        """
        for name, sizes, multiple in (
            ("rows", (self.m,), ROW_MULTIPLE),
            ("contracted size", self.k, BLOCK),
            ("columns", self.n, 64),
        ):
            for size in sizes:
                if size % multiple:
                    return f"{name} {size}: not a multiple of {multiple}"
        return None

    def tiling(self, multiprocessors: int) -> Tiling:
        """The tiling predicted to be fastest: most tiles take as long as their area."""
        if self.in_blocks:
            return _TILING_OF_BLOCKS

        def time(tiling: Tiling) -> float:
            columns = sum(math.ceil(n / tiling.tile_n) for n in self.n)
            tiles = self.batch * math.ceil(self.m / tiling.tile_m) * columns
            speed = _NARROW_SPEED if tiling.tile_n == BLOCK else 1.0
            return math.ceil(tiles / multiprocessors) * tiling.tile_n / speed

        return min(_TILINGS, key=time)


def multiply_chunks(
    xs: Sequence[Rows],
    ws: Sequence[Sequence[ScaledMatrix]],
    outs: Sequence[Rows],
    *,
    dimension: int,
) -> tuple[jax.Array, ...] | None:
    """Writes ``sum over p of xs[p] @ ws[p][q]`` into the chunk `outs[q]`.

    Args:
      xs: chunks of packed rows [..., rows, ..., K_p]. Unless blocks have scales, all have the same
        ones.
      ws: ws[p][q] is [K_p, N_q]. The same holds for those of one q.
      outs: chunks of arrays [..., rows, ..., N_q], of the same size as those in xs.
      dimension: the dimension that is divided into chunks, in xs and outs.

    Returns:
      The arrays of outs, or None if the kernel cannot do this.
    """
    lead = math.prod(xs[0].array.shape[:dimension])
    trail = math.prod(xs[0].array.shape[dimension + 1 : -1])
    problem = ScaledProblem(
        batch=lead,
        m=xs[0].size * trail,
        k=tuple(term[0].shape[0] for term in ws),
        n=tuple(w.shape[1] for w in ws[0]),
        in_blocks=ws[0][0].in_blocks,
    )
    target, takes = device.target(), _takes_chunks(xs, ws)
    undivided = all(rows.column_blocks == 1 for rows in (*xs, *outs))
    if target is None or not takes or partly_automatic() or not undivided:
        return None
    if problem.unsupported_reason() is not None:
        return None
    tiling = problem.tiling(target.multiprocessors)
    planes = [planes_of(x._replace(array=x.array.packed), dimension) for x in xs]
    x_scales, first_scale = row_scales(planes, problem.k, tiling, in_blocks=problem.in_blocks)
    launch = _shared_launch(problem, tiling, chunk_count(xs[0], dimension), first_scale, target)
    # The bytes of scales, at the ends of rows, become numbers that are not read.
    written = launch(
        [lax.bitcast_convert_type(packed, xs[0].array.dtype) for packed in planes],
        [[w.values[None] for w in term] for term in ws],
        x_scales,
        column_scales(ws, tiling),
        [planes_of(out, dimension) for out in outs],
        jax.tree.map(jnp.int32, (chunk_index(xs[0]), chunk_index(outs[0]))),
    )
    return tuple(w.reshape(out.array.shape) for w, out in zip(written, outs, strict=True))


def fits(problem: ScaledProblem, x_dtype: Any, w_dtype: Any) -> bool:
    """Whether the kernel multiplies operands of these shapes and dtypes."""
    return _takes(jnp.dtype(x_dtype), jnp.dtype(w_dtype)) and problem.unsupported_reason() is None


def multiply(rows: PackedRows, w: ScaledMatrix) -> jax.Array | None:
    """The product [..., N] of rows [..., K] and a weight; None if the kernel cannot."""
    axes = varying_axes(rows.packed) | varying_axes(w.values)
    empty = lax.empty((*rows.packed.shape[:-1], w.shape[1]), w.product_dtype)
    x = dataclasses.replace(rows, packed=rows.packed[None], array=None)
    out = vary_over(empty, axes)[None]
    written = multiply_chunks([Rows(x, 0, 1)], [[w]], [Rows(out, 0, 1)], dimension=0)
    return None if written is None else written[0][0]


def _takes_chunks(xs: Sequence[Rows], ws: Sequence[Sequence[ScaledMatrix]]) -> bool:
    """Whether the kernel multiplies such operands and rounds to the dtype of the products."""
    first = ws[0][0]
    half_precision = first.product_dtype in (jnp.bfloat16, jnp.float16)
    return half_precision and _takes(xs[0].array.dtype, first.values.dtype)


def _takes(x_dtype: Any, w_dtype: Any) -> bool:
    """Whether the kernel multiplies 8-bit operands of these dtypes."""
    return x_dtype == w_dtype or MULTIPLIES_MIXED_FP8


def row_scales(
    packed: Sequence[jax.Array], ks: Sequence[int], tiling: Tiling, *, in_blocks: bool
) -> tuple[jax.Array, int]:
    """Rows of float32 with the scales of packed rows [planes, rows, K + bytes], and their start.

    They are what `load_row_scales` loads. Whole tiles read them from the packed rows, which is
    faster than a copy by up to 5 % of the matmul.
    """
    # Blocks of a cluster compute tiles beyond the last row too.
    rows = tiling.tile_m * tiling.cluster[0]
    if packed[0].shape[1] % rows == 0 and not (len(packed) > 1 and in_blocks):
        first, (k, *_) = packed[0], ks
        numbers = first.reshape(*first.shape[:-1], -1, 4)
        return lax.bitcast_convert_type(numbers, jnp.float32), k // 4
    # The dtype of the values does not matter here.
    block = BLOCK if in_blocks else None
    each = [PackedRows(array, None, jnp.dtype(jnp.int8), block).scales for array in packed]
    scales = jnp.concatenate(each, -1) if in_blocks else each[0]
    return _padded(scales, 1, rows), 0


def column_scales(ws: Sequence[Sequence[ScaledMatrix]], tiling: Tiling) -> jax.Array:
    """The scales of weights ws[p][q]: see `ScaledMultiplication.w_scales`."""
    width = tiling.tile_n * tiling.cluster[1]

    def of_result(*terms: ScaledMatrix) -> jax.Array:
        if not terms[0].in_blocks:
            return _padded(terms[0].scales, 0, width)
        return _padded(jnp.concatenate([w.scales for w in terms], 1), 0, width // BLOCK)

    return jnp.concatenate([of_result(*terms) for terms in zip(*ws, strict=True)])


def _padded(scales: jax.Array, dimension: int, multiple: int) -> jax.Array:
    """Scales for all rows or columns of tiles: the kernel loads them without a check."""
    widths = [(0, 0)] * scales.ndim
    widths[dimension] = (0, -scales.shape[dimension] % multiple)
    return jnp.pad(scales, widths)


@functools.cache
def _shared_launch(
    problem: ScaledProblem, tiling: Tiling, chunks: int, first_scale: int, target: device.Target
) -> Any:
    """One function for all equal launches, as `chunk_matmul.shared_launch`.

    Args:
      problem: the shapes.
      tiling: how the matmul is tiled.
      chunks: the chunks that the xs are divided into.
      first_scale: the column of `ScaledGemm.x_scales` at which a row's scales begin.
      target: the GPU to build for.
    """

    @sequential_vmap
    def launch(xs, ws, x_scales, w_scales, outs, places):
        x_chunk, out_chunk = places
        x_operands = [Operand(x, 2, x_chunk, per_batch=chunks) for x in xs]
        w_operands = [[Operand(w, 2) for w in term] for term in ws]
        scales = {"in_blocks": problem.in_blocks, "first_scale": first_scale}
        gemm = ScaledGemm(x_operands, w_operands, outs, problem.batch, tiling, **scales)
        options = {"interpret": target.interpret, "writes_all": gemm.writes_all}
        kernel = gemm.kernel(outs, "scaled_matmul", target.multiprocessors, **options)
        arrays = [*xs, *(w for term in ws for w in term)]
        # The planes of all operands and of the results, and then their blocks of columns.
        planes = [*[x_chunk] * len(xs), *[0] * (len(arrays) - len(xs)), out_chunk]
        indices = jnp.stack([*map(jnp.int32, planes), *[jnp.int32(0)] * len(planes)])
        return kernel(indices, x_scales, w_scales, *arrays)

    return jax.jit(launch)
