"""Matmuls of chunks of arrays, in place: which of them the kernel can do, and the views it takes.

A chunk is a range of one dimension of an array [..., rows, ..., columns]. Chunks of equal size fill
the dimension. The kernel sees the array as planes [planes, rows, columns]: one plane for each chunk
and each index of the dimensions before it. Dimensions after it are merged with the rows. Of the
columns a chunk has all, or one of several equal blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from collective_matmul._compat import partly_automatic, vary_over, varying_axes
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul.matmul import matmul
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import MatmulProblem, Tiling, choose_tiling


class Rows(NamedTuple):
    """A chunk of an array.

    Attributes:
      array: the array.
      start: first index of the chunk, a multiple of `size`: an int or an int32 scalar.
      size: of the chunk.
      column_block: which block of the columns it has: an int or an int32 scalar.
      column_blocks: number of equal blocks that the columns are divided into.
    """

    array: Any
    start: Any
    size: int
    column_block: Any = 0
    column_blocks: int = 1

    @property
    def columns(self) -> int:
        """Number of columns of the chunk."""
        return self.array.shape[-1] // self.column_blocks


def multiply_chunks(
    xs: Sequence[Rows],
    ws: Sequence[Sequence[jax.Array]],
    outs: Sequence[Rows],
    *,
    dimension: int,
    transpose_w: bool,
) -> tuple[jax.Array, ...] | None:
    """Writes ``sum over p of xs[p] @ ws[p][q]`` into the chunk `outs[q]`.

    Args:
      xs: chunks of arrays [..., rows, ..., K_p].
      ws: ws[p][q] is [K_p, N_q], or [N_q, K_p] if `transpose_w`.
      outs: chunks of arrays [..., rows, ..., N_q], of the same size as those in xs.
      dimension: the dimension that is divided into chunks, in xs and outs.
      transpose_w: whether the ws are contracted along their last dimension.

    Returns:
      The arrays of outs, or None if the kernel cannot do this.
    """
    lead, trail = _around(xs[0].array, dimension)
    problem = MatmulProblem(
        batch=lead,
        m=xs[0].size * trail,
        k=tuple(x.columns for x in xs),
        n=tuple(out.columns for out in outs),
        w_contracted_axis=2 if transpose_w else 1,
        reads_block=any(x.column_blocks > 1 for x in xs),
        writes_block=any(out.column_blocks > 1 for out in outs),
    )
    if not _is_supported(problem, xs[0].array.dtype):
        return None
    x_operands = [
        Operand(
            planes_of(x, dimension),
            2,
            chunk_index(x),
            per_batch=chunk_count(x, dimension),
            column_block=x.column_block,
            column_blocks=x.column_blocks,
        )
        for x in xs
    ]
    w_operands = [[Operand(w[None], problem.w_contracted_axis) for w in term] for term in ws]
    planes = [planes_of(out, dimension) for out in outs]
    written = _launch(problem, x_operands, w_operands, planes, outs[0])
    return tuple(w.reshape(out.array.shape) for w, out in zip(written, outs, strict=True))


def contract_chunks(
    xs: Sequence[Rows], ys: Sequence[Sequence[Rows]], *, dimension: int
) -> tuple[jax.Array, ...] | None:
    """Returns ``sum over p of xs[p]ᵀ @ ys[p][q]`` for each q: [K, N_q], contracted over all rows.

    Args:
      xs: chunks of arrays [..., rows, ..., K].
      ys: ys[p][q] is a chunk of an array [..., rows, ..., N_q], of the same size as xs[p].
      dimension: the dimension that is divided into chunks.

    Returns:
      The products, or None if the kernel cannot do this.
    """
    lead, trail = _around(xs[0].array, dimension)
    problem = MatmulProblem(
        batch=1,
        m=xs[0].columns,
        k=tuple(x.size * trail for x in xs),
        n=tuple(y.columns for y in ys[0]),
        contracted_planes=lead,
        x_contracted_axis=1,
    )
    dtype = xs[0].array.dtype
    if not _is_supported(problem, dtype):
        return None

    def operand(chunk: Rows) -> Operand:
        return Operand(
            planes_of(chunk, dimension),
            1,
            chunk_index(chunk),
            per_contracted=chunk_count(chunk, dimension),
            column_block=chunk.column_block,
            column_blocks=chunk.column_blocks,
        )

    axes = varying_axes(xs[0].array) | varying_axes(ys[0][0].array)
    shapes = [(1, problem.m, columns) for columns in problem.n]
    empty = [vary_over(lax.empty(shape, dtype), axes) for shape in shapes]
    x_operands = [operand(x) for x in xs]
    y_operands = [[operand(y) for y in term] for term in ys]
    products = _launch(problem, x_operands, y_operands, empty, Rows(empty[0], 0, problem.m))
    return tuple(product[0] for product in products)


def _launch(
    problem: MatmulProblem,
    xs: Sequence[Operand],
    ws: Sequence[Sequence[Operand]],
    outs: Sequence[jax.Array],
    written: Rows,
) -> tuple[jax.Array, ...]:
    """Writes the chunk of every `outs` that is in the place of `written`; all are planes."""
    operands = [*xs, *itertools.chain.from_iterable(ws)]
    layout = (*map(_layout, operands), written.column_blocks)
    launch = shared_launch(problem, choose_tiling(problem), layout, device.target())
    arrays = [[o.array for o in xs], [[w.array for w in term] for term in ws]]
    planes = [*(o.index for o in operands), chunk_index(written)]
    blocks = [*(o.column_block for o in operands), written.column_block]
    return launch(*arrays, list(outs), jax.tree.map(jnp.int32, (planes, blocks)))


def _layout(operand: Operand) -> tuple[int, int, int]:
    return operand.per_batch, operand.per_contracted, operand.column_blocks


@functools.cache
def shared_launch(
    problem: MatmulProblem,
    tiling: Tiling,
    layout: tuple[Any, ...],
    target: device.Target,
) -> Any:
    """Returns one function for all equal launches: they are traced, lowered and compiled once.

    Args:
      problem: the shapes.
      tiling: how the matmul is tiled.
      layout: (per_batch, per_contracted, column_blocks) of every operand, the xs, then the ws of
        each x; and the column_blocks of the results.
      target: the GPU to build for.

    Returns:
      ``launch(xs, ws, outs, (planes, column blocks)) -> outs``. All arrays are planes. Planes and
      blocks are int32 scalars, one for every operand and one for the results.
    """

    @sequential_vmap
    def launch(xs, ws, outs, indices):
        *operands, (out_index, out_column_block) = zip(*indices, strict=True)
        places = iter([(*index, *each) for index, each in zip(operands, layout[:-1], strict=True)])

        def operand(array, contracted):
            index, column_block, per_batch, per_contracted, column_blocks = next(places)
            return Operand(
                array, contracted, index, per_batch, per_contracted, column_block, column_blocks
            )

        return matmul(
            [operand(x, problem.x_contracted_axis) for x in xs],
            [[operand(w, problem.w_contracted_axis) for w in term] for term in ws],
            outs,
            out_index,
            batch=problem.batch,
            contracted_planes=problem.contracted_planes,
            out_column_block=out_column_block,
            out_column_blocks=layout[-1],
            tiling=tiling,
            multiprocessors=target.multiprocessors,
            interpret=target.interpret,
        )

    return jax.jit(launch)


def _is_supported(problem: MatmulProblem, dtype: Any) -> bool:
    # Over automatic mesh axes the compiler would gather a kernel's operands first.
    return (
        jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and device.target() is not None
        and not partly_automatic()
        and choose_tiling(problem) is not None
    )


def _around(array: jax.Array, dimension: int) -> tuple[int, int]:
    """Returns the sizes of the dimensions before the given one, and after it up to the columns."""
    return math.prod(array.shape[:dimension]), math.prod(array.shape[dimension + 1 : -1])


def planes_of(chunk: Rows, dimension: int) -> jax.Array:
    """Returns the chunk's array as planes, [planes, rows of a chunk, columns]."""
    lead, trail = _around(chunk.array, dimension)
    planes = lead * chunk_count(chunk, dimension)
    return chunk.array.reshape(planes, chunk.size * trail, chunk.array.shape[-1])


def chunk_count(chunk: Rows, dimension: int) -> int:
    """Returns the number of chunks in the chunk's array."""
    return chunk.array.shape[dimension] // chunk.size


def chunk_index(chunk: Rows) -> Any:
    """Returns which of these chunks it is: an int or an int32 scalar."""
    return (
        chunk.start // chunk.size
        if isinstance(chunk.start, int)
        else lax.div(chunk.start, jnp.int32(chunk.size))
    )
