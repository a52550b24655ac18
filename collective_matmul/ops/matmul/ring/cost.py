"""Predicted seconds of the one-way ring.

Its chunks are multiplied by the kernel that reads and writes them in place or, where that cannot,
by XLA's matmuls with passes that cut chunks out and put them into their places.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np

from collective_matmul._compat import partly_automatic
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import HOPPER, assumed_rates, rates
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import MatmulProblem, choose_tiling
from collective_matmul.operands.format import PLAIN
from collective_matmul.ops.matmul.matmul_cost import (
    matmul_seconds,
    matmuls_seconds,
    slowdown,
    weight_gradient_seconds,
)
from collective_matmul.ops.matmul.request import Site

#: Aligned rings that were measured to be slower than XLA, and not for want of their host, are
#: predicted to gain up to 4.9 %. Rings that do gain are overrated by more, by up to a sixth.
ERROR = 0.08
#: The error where the ring waits for its host, which takes from 0.65 to 1.4 times what is
#: predicted: rings slower than XLA are predicted to gain up to 22 %. Also the error of what was not
#: measured: wide numbers, and unaligned matmuls, which XLA executes in ways that vary by shape.
UNSURE_ERROR = 0.25

#: Host time of each permute, at which the threads that drive the devices wait for each other, and
#: in each step of the ring for each x and w but the first. With few rows they exceed the matmuls.
HOST_SECONDS_PER_PERMUTE = 50e-6
HOST_SECONDS_PER_OPERAND = 12e-6


def predict(site: Site) -> Prediction | None:
    """The seconds of the ring, which is limited by its GPU or by its host.

    An all-reduce is a ring for its first half; the gather that follows is a collective.
    """
    gpu = rates()
    if gpu is None:
        return None
    on_device, on_host = _on_device(site), _on_host(site)
    after = 0.0
    if site.op == "matmul_all_reduce":
        after = gpu.collective_seconds + _bytes_sent(site) / gpu.link_bytes
    ring = max(on_device, on_host)
    was_measured = gpu is HOPPER and site.is_aligned and site.dtype.itemsize == 2
    measured: float | None = ERROR
    if site.format != PLAIN:
        measured = site.format.ring_error if multiplies_in_place(site) else None
    error = UNSURE_ERROR if measured is None or not was_measured else measured
    at_most = max((1 + error) * on_device, (1 + UNSURE_ERROR) * on_host)
    return Prediction(ring + after, at_most / ring - 1, gpu.basis)


def _on_device(site: Site) -> float:
    permutes = site.axis_size - 1
    bytes_at_once = _bytes_sent(site) / max(permutes, 1)
    gpu = assumed_rates()
    copy = gpu.copy_seconds + bytes_at_once / gpu.link_bytes
    multiply = _chunk_matmuls(site, site.chunk_rows)
    steps = permutes * max(multiply, copy) + multiply
    gradients = weight_gradient_seconds(site)
    return steps + _passes(site) + gradients + _waits_for_weights(site, multiply, gradients)


def _waits_for_weights(site: Site, multiply: float, gradients: float) -> float:
    """Seconds in which the gather of weights, and the scatter of gradients, has nothing to hide it.

    Shards travel under the first product with them, but for its last block. In a backward pass
    without a ring they travel under the weight gradients instead.
    """
    if site.weight_shards is None:
        return 0.0
    gpu, devices = assumed_rates(), site.weight_shards.axis_size
    bytes_at_once = site.weight_bytes / site.weight_transfers
    travels = (devices - 1) * gpu.copy_seconds + bytes_at_once / gpu.link_bytes
    hidden = (devices - 1) / devices
    if site.direction == "forward":
        return max(0.0, travels - hidden * multiply)
    if site.axis_size == 1:
        return 2 * max(0.0, travels - hidden * gradients)
    return max(0.0, travels - hidden * multiply) + max(0.0, travels - hidden * gradients)


def _on_host(site: Site) -> float:
    permutes = 1 if site.co_gathered is None else 2
    operands = len(site.operands) - 1
    step = permutes * HOST_SECONDS_PER_PERMUTE + operands * HOST_SECONDS_PER_OPERAND
    weights = 0.0
    if site.weight_shards is not None:
        copies = site.weight_transfers * (site.weight_shards.axis_size - 1) * len(site.operands)
        weights = copies * HOST_SECONDS_PER_PERMUTE
    return assumed_rates().host_seconds + (site.axis_size - 1) * step + weights


def _bytes_sent(site: Site) -> int:
    """Bytes that each device sends in the ring; for an all-reduce, in its first half."""
    own = site.bytes_communicated - site.weight_bytes
    return own // (2 if site.op == "matmul_all_reduce" else 1)


def _chunk_matmuls(site: Site, rows: int) -> float:
    """Seconds of a chunk's matmuls: the kernel that works in place has all in the same waves."""
    if not multiplies_in_place(site):
        return matmuls_seconds(site, rows)
    factor = slowdown(site)
    return factor * matmul_seconds(rows, site.contracted, site.columns, splits=False)


def _passes(site: Site) -> float:
    """Seconds of the passes over memory that a ring makes and XLA does not."""
    elements, kernels = (0, 0) if multiplies_in_place(site) else _copies(site)
    if site.op != "all_gather_matmul":
        # What arrives is added to all chunks but the first.
        steps = site.axis_size - 1
        product = site.product_rows * site.columns
        elements, kernels = elements + 3 * product * steps // site.axis_size, kernels + steps
    moved = elements * np.dtype(site.dtype).itemsize
    gpu = assumed_rates()
    return kernels * gpu.kernel_seconds / 2 + moved / gpu.pass_bytes


def _copies(site: Site) -> tuple[int, int]:
    """Elements read and written by copies between chunks and whole arrays, and their kernels."""
    chunks = site.axis_size
    if site.op == "all_gather_matmul":
        # Every chunk of the product is read again and written into its place.
        elements, kernels = 2 * site.product_rows * site.columns, chunks * len(site.operands)
        if site.einsum is not None and site.einsum.accumulates:
            # Every chunk's product is as large as the result, and added to it in float32.
            results = 2 * chunks * site.contracted * site.columns
            elements = results * 4 // np.dtype(site.dtype).itemsize
        gathered = site.product_rows * site.contracted
    else:
        # Every chunk of x is cut out.
        elements, kernels = 2 * site.rows * site.contracted, chunks
        gathered = chunks * math.prod(site.co_gathered or (0,))
    if site.has_weight_gradient:
        elements, kernels = elements + 2 * gathered, kernels + chunks
    return elements, kernels


def multiplies_in_place(site: Site) -> bool:
    """Whether the ring's matmuls are the kernel's, which reads and writes chunks in place."""
    half_precision = site.dtype in (jnp.bfloat16, jnp.float16)
    if not assumed_rates().multiplies_in_place or not half_precision:
        return False
    if site.einsum is not None or partly_automatic():
        return False
    rows = site.chunk_rows
    if site.format != PLAIN:
        return site.format.fits_kernel(site, rows, backward=site.direction == "backward")
    x, _ = site.operands[0]
    planes = math.prod(x[: site.dimension or 0])
    ks, ns = zip(*(w for _, w in site.operands), strict=True)
    if site.op == "all_gather_matmul":
        ks = ks[:1]
    else:
        ns = ns[:1]
    w_contracted = 2 if site.transpose_w else 1
    return _has_tiling(
        MatmulProblem(planes, rows // planes, ks, ns, w_contracted_axis=w_contracted)
    )


@functools.cache
def _has_tiling(problem: MatmulProblem) -> bool:
    return choose_tiling(problem) is not None
