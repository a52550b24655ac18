"""Products with blocks of weights that are sharded over a second mesh axis.

A device's shard is a block of a weight [K, N]: a slice of K, or of N. Depending on which of them a
product contracts, it is a sum over blocks, or each block of its columns is a product of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.chunked import Chunked
from collective_matmul.operands.multiply import contract, multiply_chunks
from collective_matmul.operands.sharded import Sharded, WeightShards

#: Blocks of all weights: the number of the block, an int32 scalar, and each weight's shard.
Blocks = Sequence[tuple[Any, Sequence[jax.Array]]]


def multiply_blocks(
    weights: Sequence[Sharded],
    blocks: Blocks,
    xs: Sequence[Rows],
    outs: Sequence[Rows],
    *,
    dimension: int,
    transpose_w: bool,
) -> tuple[jax.Array, ...]:
    """Multiplies xs by the blocks that are given, and writes the result into chunks of `outs`.

    Either there is one x, and each weight has a result; or there is one result, the sum over pairs
    of an x and a weight.

    Args:
      weights: the weights, which all are sharded alike.
      blocks: the blocks to multiply by.
      xs: chunks of arrays [..., rows, ..., K].
      outs: chunks of arrays [..., rows, ..., N].
      dimension: the dimension that is divided into chunks, in xs and outs.
      transpose_w: whether the weights are contracted along their last dimension.

    Returns:
      The arrays of outs. If blocks are terms of a sum, that of the given blocks; if they are
      columns, other columns keep their values.
    """
    devices = weights[0].sharding.axis_size

    def as_terms(shards: Sequence[jax.Array]) -> list[list[jax.Array]]:
        return [list(shards)] if len(xs) == 1 else [[shard] for shard in shards]

    def block_of(rows: Rows, number: Any) -> Rows:
        return rows._replace(column_block=number, column_blocks=devices)

    options: dict[str, Any] = {"dimension": dimension, "transpose_w": transpose_w}
    if not weights[0].divides_columns(transpose_w):
        operands = [block_of(x, number) for number, _ in blocks for x in xs]
        terms = [term for _, shards in blocks for term in as_terms(shards)]
        return multiply_chunks(operands, terms, outs, **options)
    for number, shards in blocks:
        places = [block_of(out, number) for out in outs]
        arrays = multiply_chunks(xs, as_terms(shards), places, **options)
        outs = [out._replace(array=array) for out, array in zip(outs, arrays, strict=True)]
    return tuple(out.array for out in outs)


def contract_block(
    sharding: WeightShards,
    number: Any,
    x: jax.Array | Chunked,
    ys: Sequence[jax.Array | Chunked],
    *,
    dimension: int,
) -> tuple[jax.Array, ...]:
    """One block of ``xᵀ y`` for each y, contracted over all rows: [K/F, N] or [K, N/F]."""
    block, all_columns = (number, sharding.axis_size), (0, 1)
    return contract(
        x,
        ys,
        dimension=dimension,
        x_block=block if sharding.dimension == 0 else all_columns,
        y_block=block if sharding.dimension == 1 else all_columns,
    )
