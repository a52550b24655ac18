"""Why an implementation cannot carry out a site."""

from __future__ import annotations

from collective_matmul.choose.fused_kernels import of_kernel
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
    reason = of_kernel(
        site,
        fused_gather.why_not,
        fused_scatter.why_not_reduce_scatter,
        fused_scatter.why_not_all_reduce,
    )
    return reason or peer_access_obstacle() or program_obstacle()
