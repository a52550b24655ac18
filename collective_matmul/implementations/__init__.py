"""Ways to carry out an op. Every way offers the same three functions with the same signatures.

Legend of shapes, all local to one device: D devices on the axis, K contracted, N columns.

``all_gather_matmul(x, ws, axis_name, *, dimension, keep_gathered=False) -> (ys, gathered)``
    x [..., m, ..., K], each w [K, N] -> each y [..., D*m, ..., N]; gathered is x whole, or None.
``matmul_reduce_scatter(xs, ws, axis_name, *, dimension, rider=None) -> (y, gathered)``
    each x [..., M, ..., K], each w [K, N] -> y [..., M/D, ..., N], summed over pairs and devices.
    A rider [..., r, ...] is gathered along `dimension` in the same loop and handed back whole.
``matmul_all_reduce(x, w, axis_name) -> y``
    x [..., K], w [K, N] -> y [..., N], summed over devices and typed as replicated over the axis.

Sums between devices travel in the arrays' own dtype; within a matmul they are float32.
"""

from __future__ import annotations

import functools
from types import MappingProxyType, SimpleNamespace

from collective_matmul.implementations import bulk, ring
from collective_matmul.schedule import Pattern


def _ring(pattern: Pattern) -> SimpleNamespace:
    return SimpleNamespace(
        all_gather_matmul=functools.partial(ring.all_gather_matmul, pattern=pattern),
        matmul_reduce_scatter=functools.partial(ring.matmul_reduce_scatter, pattern=pattern),
        matmul_all_reduce=functools.partial(ring.matmul_all_reduce, pattern=pattern),
    )


IMPLEMENTATIONS = MappingProxyType(
    {
        "bulk": bulk,
        "ring": _ring("one_way"),
        "ring_two_way": _ring("two_way"),
        "ring_direct": _ring("direct"),
    }
)
