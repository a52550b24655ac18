"""A Hopper matmul that reads and writes chunks of arrays in place.

``outs[q][b, j] = sum over p of xs[p][b, i_p] @ ws[p][q]``

A ring multiplies one chunk at a time. XLA's matmul takes each chunk as an array of its own: so XLA
copies it out of a larger operand before the matmul, copies the product into a larger result after
it, and adds products in further passes. Here the indices of the chunks are operands. The kernel
reads and writes chunks in place. It sums over several pairs of operands in its float32 accumulator:
gradients that several weights contribute to, and chunks that are not contiguous. And it multiplies
by several weights in one launch, so that together they fill waves.

The kernel itself is in `collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collective_matmul.mosaic_gpu.hopper_matmul.matmul_kernel import PersistentGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling


def matmul(
    xs: Sequence[Operand],
    ws: Sequence[Sequence[Operand]],
    outs: Sequence[jax.Array],
    out_index: Any,
    *,
    batch: int,
    contracted_planes: int = 1,
    out_column_block: Any = 0,
    out_column_blocks: int = 1,
    tiling: Tiling,
    multiprocessors: int,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Returns `outs` with plane ``b * J + out_index`` of each overwritten, for every batch b.

    Args:
      xs: one operand for each term p of the sum; all bfloat16 or all float16. Every array's last
        dimension is a multiple of 8.
      ws: ws[p][q] multiplies xs[p] in result q.
      outs: one array for each q, [batch * J, rows, columns]. Other planes keep their values.
      out_index: which of every J planes to write.
      batch: planes of each result to write.
      contracted_planes: planes of every operand that are summed over, besides its contracted axis.
      out_column_block: the block of the results' columns to write. Other columns keep their values.
      out_column_blocks: number of blocks that the columns of each result are divided into.
      tiling: how the matmul is tiled.
      multiprocessors: number of multiprocessors of the GPU. Each executes one persistent block.
      interpret: how to interpret the kernel on the CPU, see `pl.kernel`; False for GPUs.

    Returns:
      One array for each of outs, of the same shape; the memory of outs is reused, unless all of it
      is overwritten.
    """
    operands = [*xs, *itertools.chain.from_iterable(ws)]
    planes = [*(operand.index for operand in operands), out_index]
    blocks = [*(operand.column_block for operand in operands), out_column_block]
    indices = jnp.stack([jnp.asarray(index, jnp.int32) for index in (*planes, *blocks)])
    gemm = PersistentGemm(xs, ws, outs, batch, contracted_planes, tiling, out_column_blocks)
    options = {"interpret": interpret, "writes_all": gemm.writes_all}
    kernel = gemm.kernel(outs, "chunk_matmul", multiprocessors, **options)
    return kernel(indices, *(operand.array for operand in operands))
