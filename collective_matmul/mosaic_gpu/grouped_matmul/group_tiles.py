"""The tiles of rows that belong to one group each, as the kernel takes them.

Groups of rows follow each other, of any sizes. TMA sees memory in tiles of 8 rows, so a tile begins
at a multiple of 8: the first tile of a group may begin with rows of groups before, and the last one
may end with rows of groups after. These rows are multiplied, but their products are not stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE


class GroupTiles(NamedTuple):
    """The tiles of all groups, in the order of their rows.

    Attributes:
      used: int32 [1], the number of tiles. Later entries of the arrays below mean nothing.
      groups: int32 [tiles], the group of each tile.
      rows: int32 [tiles], the first row of each tile, in units of 8 rows.
      bounds: int32 [2 G], the first row and the end of each group.
    """

    used: Any
    groups: Any
    rows: Any
    bounds: Any


def group_bounds(sizes: jax.Array) -> jax.Array:
    """Returns int32 [2 G], the first row and the end of each group of int32 [G] sizes."""
    ends = sums_up_to(sizes)
    return jnp.stack([ends - sizes, ends], axis=1).reshape(-1)


def most_tiles(rows: int, groups: int, block: int) -> int:
    """Returns the most tiles of `block` rows that groups of any sizes take, of `rows` together."""
    groups = min(groups, rows)
    return (rows + groups * (ROW_MULTIPLE - 1 + block - 1)) // block


def group_tiles(sizes: jax.Array, rows: int, block: int) -> GroupTiles:
    """Returns the tiles of groups.

    Args:
      sizes: int32 [G], rows of each group; together at most `rows`.
      rows: the number of rows of the array.
      block: rows of a tile, a multiple of 8.
    """
    bounds = group_bounds(sizes)
    starts, ends = bounds[::2], bounds[1::2]
    firsts = starts // ROW_MULTIPLE * ROW_MULTIPLE
    counts = jnp.where(sizes > 0, (ends - firsts + (block - 1)) // block, 0)
    upto = sums_up_to(counts)
    number = jnp.arange(max(1, most_tiles(rows, sizes.size, block)), dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= upto[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.size - 1)
    row = firsts[group] + (number - (upto - counts)[group]) * block
    return GroupTiles(upto[-1:], group, row // ROW_MULTIPLE, bounds)


def sums_up_to(sizes: jax.Array) -> jax.Array:
    """Returns the cumulative sum of int32 [G], as one sum that XLA fuses with what is around it."""
    number = jnp.arange(sizes.size, dtype=jnp.int32)
    summed = jnp.where(number[None, :] <= number[:, None], sizes[None, :], 0)
    return jnp.sum(summed, axis=1, dtype=jnp.int32)
