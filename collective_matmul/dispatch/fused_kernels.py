"""What there is to know of the fused kernel of a site, from the arrays that it would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from collective_matmul.backends.fused import all_gather, reduce_scatter
from collective_matmul.site import Site

T = TypeVar("T")


def of_kernel(
    site: Site,
    all_gather: Callable[..., T],
    reduce_scatter: Callable[..., T],
    all_reduce: Callable[..., T],
) -> T:
    """What the function of the site's op says of its arrays, as they lie on one device."""
    xs = [jax.ShapeDtypeStruct(x, site.dtype) for x, _ in site.operands]
    ws = [
        jax.ShapeDtypeStruct(w[::-1] if site.transpose_w else w, site.dtype)
        for _, w in site.operands
    ]
    if site.op == "matmul_all_reduce":
        return all_reduce(xs[0], ws[0], site.axis_size)
    assert site.dimension is not None
    lie = {"dimension": site.dimension, "transpose_w": site.transpose_w}
    if site.op == "all_gather_matmul":
        return all_gather(xs[0], ws, site.axis_size, **lie)
    return reduce_scatter(xs, ws, site.axis_size, **lie)


def planned_seconds(site: Site) -> float:
    """What the kernel's plan says that it takes; of sites that a kernel can carry out."""
    microseconds = of_kernel(
        site,
        all_gather.predicted_microseconds,
        reduce_scatter.predicted_reduce_scatter_microseconds,
        reduce_scatter.predicted_all_reduce_microseconds,
    )
    return 1e-6 * microseconds
