"""One kernel for an op: it communicates while it multiplies, and no host stands between chunks.

Where the kernel cannot do a call, a ring or bulk does it instead, and a sentence says why, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.implementations import bulk, ring
from collective_matmul.implementations.chunks import Gathered, weight_gradients
from collective_matmul.kernels import fused_gather, fused_scatter
from collective_matmul.log import say_once

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "weight_gradients"]


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    keep_gathered: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | Gathered | None]:
    """Multiplies the rows of x as they arrive. Shapes: see the package's docstring."""
    facts = {"dimension": dimension, "transpose_w": transpose_w}
    if reason := fused_gather.why_not(x, ws, lax.axis_size(axis_name), **facts):
        say_once(f"fused all_gather_matmul falls back to a ring: {reason}")
        return ring.all_gather_matmul(x, ws, axis_name, keep_gathered=keep_gathered, **facts)
    return fused_gather.all_gather_matmul(x, ws, axis_name, keep_gathered=keep_gathered, **facts)


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    rider: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | Gathered | None]:
    """Sums tiles where they belong as they arrive. Shapes: see the package's docstring.

    A rider is gathered by a collective of its own, before: one that holds multiprocessors here, and
    waits for a device where the kernel holds all, would wait forever.
    """
    facts = {"dimension": dimension, "transpose_w": transpose_w}
    if reason := fused_scatter.why_not_reduce_scatter(xs, ws, lax.axis_size(axis_name), **facts):
        say_once(f"fused matmul_reduce_scatter falls back to a ring: {reason}")
        return ring.matmul_reduce_scatter(xs, ws, axis_name, rider=rider, **facts)
    gathered = None
    if rider is not None:
        gathered = lax.all_gather(rider, axis_name, axis=dimension, tiled=True)
        xs, gathered = lax.optimization_barrier((xs, gathered))
    return fused_scatter.matmul_reduce_scatter(xs, ws, axis_name, **facts), gathered


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    """Sums tiles on every device, or on one that tells the others. Shapes: see the package's."""
    if reason := fused_scatter.why_not_all_reduce(x, w, lax.axis_size(axis_name)):
        say_once(f"fused matmul_all_reduce falls back to bulk: {reason}")
        return bulk.matmul_all_reduce(x, w, axis_name)
    return fused_scatter.matmul_all_reduce(x, w, axis_name)
