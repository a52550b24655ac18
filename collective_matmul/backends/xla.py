"""One collective and one matmul: with XLA's, the baseline. Nothing overlaps by construction."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from collective_matmul.backends.arithmetic import add, contract_rows, matmul
from collective_matmul.backends.one_shot.collectives import XLA, Collectives


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    keep_gathered: bool = False,
    by: Collectives = XLA,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Gathers x, then multiplies. Shapes: see the package's docstring."""
    gathered = by.all_gather(x, axis_name, dimension)
    ys = tuple(matmul(gathered, w, transpose_w) for w in ws)
    return ys, gathered if keep_gathered else None


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    co_gathered: jax.Array | None = None,
    by: Collectives = XLA,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiplies, then reduce-scatters. Shapes: see the package's docstring."""
    partial = add(*(matmul(x, w, transpose_w) for x, w in zip(xs, ws, strict=True)))
    y = by.reduce_scatter(partial, axis_name, dimension)
    if co_gathered is None:
        return y, None
    return y, by.all_gather(co_gathered, axis_name, dimension)


def matmul_all_reduce(
    x: jax.Array, w: jax.Array, axis_name: str, *, by: Collectives = XLA
) -> jax.Array:
    """Multiplies, then all-reduces. Shapes: see the package's docstring."""
    return by.all_reduce(matmul(x, w), axis_name)


def weight_gradients(
    x: jax.Array, ys: Sequence[jax.Array], *, dimension: int
) -> tuple[jax.Array, ...]:
    """Contracts all rows of x and each y. Shapes: see the package's docstring."""
    del dimension
    return tuple(contract_rows(x, y) for y in ys)
