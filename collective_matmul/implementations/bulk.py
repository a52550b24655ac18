"""One XLA collective and one matmul: the baseline. Nothing overlaps by construction."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.implementations.arithmetic import add, contract_rows, matmul


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    keep_gathered: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Gathers x, then multiplies. Shapes: see the package's docstring."""
    gathered = lax.all_gather(x, axis_name, axis=dimension, tiled=True)
    ys = tuple(matmul(gathered, w, transpose_w) for w in ws)
    return ys, gathered if keep_gathered else None


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    rider: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiplies, then reduce-scatters. Shapes: see the package's docstring."""
    partial = add(*(matmul(x, w, transpose_w) for x, w in zip(xs, ws, strict=True)))
    y = lax.psum_scatter(partial, axis_name, scatter_dimension=dimension, tiled=True)
    if rider is None:
        return y, None
    return y, lax.all_gather(rider, axis_name, axis=dimension, tiled=True)


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    """Multiplies, then all-reduces. Shapes: see the package's docstring."""
    return lax.psum(matmul(x, w), axis_name)


def weight_gradients(
    x: jax.Array, ys: Sequence[jax.Array], *, dimension: int
) -> tuple[jax.Array, ...]:
    """Contracts all rows of x and each y. Shapes: see the package's docstring."""
    del dimension
    return tuple(contract_rows(x, y) for y in ys)
