"""Why an implementation cannot carry out a site."""

from __future__ import annotations

import jax

from collective_matmul.choose.site import Site
from collective_matmul.implementations import RINGS
from collective_matmul.kernels import fused_gather, fused_scatter
from collective_matmul.peer_access import peer_access_obstacle, program_obstacle


def obstacle_of(site: Site, implementation: str) -> str | None:
    """Why `implementation` cannot carry out `site`, or None.

    For a site that is being traced it is asked inside its `jax.shard_map`.
    """
    if implementation in RINGS:
        return _obstacle_of_rings(site)
    if implementation == "fused":
        return _obstacle_of_kernels(site)
    return None


def _obstacle_of_rings(site: Site) -> str | None:
    if site.op == "matmul_all_reduce" and site.rows % site.axis_size:
        return (
            f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
            f" {site.axis_size}"
        )
    return None


def _obstacle_of_kernels(site: Site) -> str | None:
    if site.einsum is not None:
        return f"{site.einsum.equation!r} is no matmul, and the fused kernels do nothing else"
    xs = [jax.ShapeDtypeStruct(x, site.dtype) for x, _ in site.operands]
    ws = [
        jax.ShapeDtypeStruct(w[::-1] if site.transpose_w else w, site.dtype)
        for _, w in site.operands
    ]
    if site.op == "matmul_all_reduce":
        reason = fused_scatter.why_not_all_reduce(xs[0], ws[0], site.axis_size)
    else:
        assert site.dimension is not None
        lie = {"dimension": site.dimension, "transpose_w": site.transpose_w}
        if site.op == "all_gather_matmul":
            reason = fused_gather.why_not(xs[0], ws, site.axis_size, **lie)
        else:
            reason = fused_scatter.why_not_reduce_scatter(xs, ws, site.axis_size, **lie)
    return reason or peer_access_obstacle() or program_obstacle()
