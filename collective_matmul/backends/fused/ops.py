"""One kernel for an op: it communicates while it multiplies, and no host stands between chunks.

What the kernels cannot do they refuse with a ValueError; `collective_matmul.dispatch` asks before.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.backends.fused import reduce_scatter
from collective_matmul.backends.fused.all_gather import all_gather_matmul
from collective_matmul.backends.fused.reduce_scatter import matmul_all_reduce
from collective_matmul.backends.xla import weight_gradients

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "weight_gradients"]


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    co_gathered: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums tiles where they belong as they arrive. Shapes: see the package's docstring.

    A co_gathered is gathered by a collective of its own, before: one that holds multiprocessors here, and
    waits for a device where the kernel holds all, would wait forever.
    """
    gathered = None
    if co_gathered is not None:
        gathered = lax.all_gather(co_gathered, axis_name, axis=dimension, tiled=True)
        xs, gathered = lax.optimization_barrier((xs, gathered))
    y = reduce_scatter.matmul_reduce_scatter(
        xs, ws, axis_name, dimension=dimension, transpose_w=transpose_w
    )
    return y, gathered
