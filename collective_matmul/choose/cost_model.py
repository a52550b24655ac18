"""Seconds that bulk and ring are predicted to take on an NVLink Hopper GPU.

A bulk op takes its collective and its matmul one after the other. A ring takes its matmul, since
the transfers run under it, but never less than the host needs to issue its permutes: each has a
rendezvous between the threads that drive the devices, and below some size that is all a ring does.

The constants were measured on H200 GPUs with jax 0.11.2, bfloat16, inside compiled stacks.
"""

from __future__ import annotations

from collective_matmul.choose.site import Site

MATMUL_FLOPS_PER_SECOND = 7.0e14
COLLECTIVE_BYTES_PER_SECOND = 2.5e11
COLLECTIVE_LATENCY_SECONDS = 20e-6
HOST_SECONDS_PER_PERMUTE = 50e-6
RING_OVERHEAD = 1.04  # Chunks written into place, accumulators added, partial waves.


def bulk_seconds(site: Site) -> float:
    """Predicted seconds of the collective, then the matmul."""
    return _collective_seconds(site.bytes_communicated) + site.flops / MATMUL_FLOPS_PER_SECOND


def ring_seconds(site: Site) -> float:
    """Predicted seconds of the ring: its matmul or its host, whichever is longer.

    An all-reduce is a ring for its first half; the gather that follows is a collective.
    """
    host = (site.axis_size - 1) * HOST_SECONDS_PER_PERMUTE
    seconds = max(RING_OVERHEAD * site.flops / MATMUL_FLOPS_PER_SECOND, host)
    if site.op == "matmul_all_reduce":
        seconds += _collective_seconds(site.bytes_communicated // 2)
    return seconds


def _collective_seconds(bytes_communicated: int) -> float:
    return COLLECTIVE_LATENCY_SECONDS + bytes_communicated / COLLECTIVE_BYTES_PER_SECOND
