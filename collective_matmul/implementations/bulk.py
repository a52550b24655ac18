"""One XLA collective and one matmul: the baseline. Nothing overlaps by construction."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.implementations.arithmetic import matmul, matmul_sum


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    keep_gathered: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Gathers x, then multiplies. Shapes: see the package's docstring."""
    gathered = lax.all_gather(x, axis_name, axis=dimension, tiled=True)
    return tuple(matmul(gathered, w) for w in ws), gathered if keep_gathered else None


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    rider: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiplies, then reduce-scatters. Shapes: see the package's docstring."""
    partial = matmul_sum(xs, ws)
    y = lax.psum_scatter(partial, axis_name, scatter_dimension=dimension, tiled=True)
    if rider is None:
        return y, None
    return y, lax.all_gather(rider, axis_name, axis=dimension, tiled=True)


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    """Multiplies, then all-reduces. Shapes: see the package's docstring."""
    return lax.psum(matmul(x, w), axis_name)
