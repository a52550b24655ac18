"""Ways to carry out an op. Every way offers the same four functions with the same signatures.

Legend of shapes, all local to one device: D devices on the axis, K contracted, N columns.

``all_gather_matmul(x, ws, axis_name, *, dimension, ...) -> (ys, gathered)``
    x [..., m, ..., K], each w [K, N] -> each y [..., D*m, ..., N]. With ``keep_gathered=True``,
    gathered is what `weight_gradients` of the same way takes for x whole, else None.
``matmul_reduce_scatter(xs, ws, axis_name, *, dimension, ...) -> (y, gathered)``
    each x [..., M, ..., K], each w [K, N] -> y [..., M/D, ..., N], summed over pairs and devices.
    A ``co_gathered=`` [..., r, ...] is gathered along `dimension` in the same loop.
``weight_gradients(x, ys, *, dimension) -> dws``
    x [..., M, ..., K], each y [..., M, ..., N] -> each dw [K, N], contracted over all but the last
    dimension. Either x or the only y may be what was gathered along `dimension`.
``matmul_all_reduce(x, w, axis_name) -> y``
    x [..., K], w [K, N] -> y [..., N], summed over devices and typed as replicated over the axis.

With ``transpose_w=True`` the weights of the first two are [N, K], contracted along the last.
Sums between devices travel in the arrays' own dtype; within a matmul they are float32.
"""

from __future__ import annotations

import functools
from types import MappingProxyType, SimpleNamespace
from typing import Any

from collective_matmul.backends import xla
from collective_matmul.backends.fused import ops
from collective_matmul.backends.one_shot.collectives import ONE_SHOT
from collective_matmul.backends.ring import walk
from collective_matmul.backends.ring.schedule import Pattern


def _ring(pattern: Pattern) -> SimpleNamespace:
    return SimpleNamespace(
        all_gather_matmul=functools.partial(walk.all_gather_matmul, pattern=pattern),
        matmul_reduce_scatter=functools.partial(walk.matmul_reduce_scatter, pattern=pattern),
        matmul_all_reduce=functools.partial(walk.matmul_all_reduce, pattern=pattern),
        weight_gradients=walk.weight_gradients,
    )


_ONE_SHOT = SimpleNamespace(
    all_gather_matmul=functools.partial(xla.all_gather_matmul, by=ONE_SHOT),
    matmul_reduce_scatter=functools.partial(xla.matmul_reduce_scatter, by=ONE_SHOT),
    matmul_all_reduce=functools.partial(xla.matmul_all_reduce, by=ONE_SHOT),
    weight_gradients=xla.weight_gradients,
)

#: The schedule that each ring walks.
RINGS: MappingProxyType[str, Pattern] = MappingProxyType(
    {"ring": "one_way", "ring_two_way": "two_way", "ring_direct": "direct"}
)
#: Those whose kernels address peers' memory.
KERNELS: MappingProxyType[str, Any] = MappingProxyType({"fused": ops, "one_shot": _ONE_SHOT})
IMPLEMENTATIONS: MappingProxyType[str, Any] = MappingProxyType(
    {"xla": xla, **{name: _ring(pattern) for name, pattern in RINGS.items()}, **KERNELS}
)
