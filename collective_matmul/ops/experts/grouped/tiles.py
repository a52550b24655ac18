"""Groups of rows, and the tiles into which kernels divide them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from collective_matmul.mosaic_gpu.grouped_matmul.group_tiles import sums_up_to


def starts_of(sizes: jax.Array) -> jax.Array:
    """The first row of each group, int32 [G], if groups follow each other."""
    return sums_up_to(sizes) - sizes


def count_tiles(rows: int, groups: int, block: int) -> int:
    """The most tiles of `block` rows that any sizes of groups take, of `rows` together."""
    return math.ceil(rows / block) + min(groups, rows) - 1 if rows else 0


def tiles_of(sizes: jax.Array, rows: int, block: int) -> jax.Array:
    """The tiles of rows, each of rows of one group, ordered by their rows.

    Args:
      sizes: int32 [G], rows of each group; together at most `rows`.
      rows: the static number of rows, those of no group included.
      block: the largest number of rows of a tile.

    Returns:
      int32 [tiles, 3]: the group, the first row and the end. Tiles that no group needs are empty:
      their first row is the end.
    """
    tiles = (sizes + (block - 1)) // block
    ends = sums_up_to(tiles)
    number = jnp.arange(count_tiles(rows, sizes.size, block), dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.size - 1)
    first = starts_of(sizes)
    start = first[group] + (number - (ends - tiles)[group]) * block
    end = jnp.minimum(start + block, (first + sizes)[group])
    return jnp.stack([group, jnp.minimum(start, end), end], axis=1)
