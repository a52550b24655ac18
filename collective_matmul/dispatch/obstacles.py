"""Why an implementation cannot carry out a site."""

from __future__ import annotations

from collective_matmul.backends import KERNELS, RINGS
from collective_matmul.backends.fused import all_gather, reduce_scatter
from collective_matmul.dispatch import exchanges
from collective_matmul.dispatch.fused_kernels import of_kernel
from collective_matmul.peer_access import no_peer_access_reason, peer_kernels_disallowed_reason
from collective_matmul.site import Site


def obstacle_of(site: Site, implementation: str) -> str | None:
    """Why `implementation` cannot carry out `site`, or None.

    For a site that is being traced it is asked inside its `jax.shard_map`.
    """
    if implementation in RINGS:
        return _obstacle_of_rings(site)
    if implementation in KERNELS:
        return _obstacle_of_kernels(site, implementation)
    return None


def _obstacle_of_rings(site: Site) -> str | None:
    if site.op == "matmul_all_reduce" and site.rows % site.axis_size:
        return (
            f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
            f" {site.axis_size}"
        )
    return None


def _obstacle_of_kernels(site: Site, implementation: str) -> str | None:
    if site.einsum is not None:
        return f"{site.einsum.equation!r} is no matmul, and these kernels do nothing else"
    reason = _obstacle_of_fused(site) if implementation == "fused" else exchanges.why_not(site)
    return reason or no_peer_access_reason() or peer_kernels_disallowed_reason()


def _obstacle_of_fused(site: Site) -> str | None:
    return of_kernel(
        site,
        all_gather.why_not,
        reduce_scatter.why_not_reduce_scatter,
        reduce_scatter.why_not_all_reduce,
    )
