"""Seconds that bulk and ring take by prediction, for sites that no measurement is near to.

The constants are of Hopper GPUs joined by NVLink and NVSwitch, measured inside compiled stacks of
bfloat16 layers on four H200, and of few rows on two. There the chip is limited by its power:
whatever lets the tensor cores rest lets the next matmul run faster. So a pass over memory, or a
collective, adds less to a stack than it takes alone, and a full wave of tiles runs faster than
matmuls do in the long run. Of few rows the host decides, which launches everything.

Only the ring of XLA's own matmuls is modelled. Kernels that save it passes make it faster than
predicted; whether they do is for a table to say.
"""

from __future__ import annotations

import math

import numpy as np

from collective_matmul.choose.site import Site
from collective_matmul.choose.tables import Prediction

#: As JAX names the GPUs that the constants are true of.
DEVICE_KINDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")

#: A ring must be predicted to gain this much over bulk: by so much the model was seen to overrate
#: rings where it was compared with measurements. One that waits for its host must gain twice as
#: much: hosts were seen to take from 0.8 to 1.5 times what is predicted.
MARGIN = 0.05

MULTIPROCESSORS = 132
#: Rows and columns of a tile of a matmul, and its share of the peak rate.
TILES = ((128, 256, 1.0), (128, 128, 0.75), (64, 128, 0.5))
PEAK_FLOPS_PER_SECOND = 8.4e14
SUSTAINED_FLOPS_PER_SECOND = 6.2e14
OPERAND_BYTES_PER_SECOND = 4.0e12
KERNEL_SECONDS = 4e-6

COLLECTIVE_SECONDS = 28e-6
COLLECTIVE_BYTES_PER_SECOND = 4.6e11
#: XLA runs part of a backward's collectives under the matmul of the weight gradient.
COLLECTIVE_EXPOSED_IN_BACKWARD = 0.5

COPY_SECONDS = 10e-6
COPY_BYTES_PER_SECOND = 3.76e11
PASS_BYTES_PER_SECOND = 6.5e12
#: What the host takes for an op, however it is carried out; and for each permute, at which the
#: threads that drive the devices meet, on top: no ring gains where bulk too waits for the host.
HOST_SECONDS = 40e-6
HOST_SECONDS_PER_PERMUTE = 45e-6


def predict(site: Site) -> Prediction:
    """What the model says of bulk and of the ring."""
    seconds = {"bulk": bulk_seconds(site), "ring": ring_seconds(site)}
    waits_for_host = _ring_on_host(site) > _ring_on_device(site)
    return Prediction(seconds, 2 * MARGIN if waits_for_host else MARGIN, "cost model")


def bulk_seconds(site: Site) -> float:
    """Predicted seconds of the collectives and the matmuls, one after the other, or of the host."""
    exposed = COLLECTIVE_EXPOSED_IN_BACKWARD if site.has_weight_gradient else 1.0
    collectives = 1 if site.rider is None else 2
    communication = (
        collectives * COLLECTIVE_SECONDS + site.bytes_communicated / COLLECTIVE_BYTES_PER_SECOND
    )
    multiplication = _matmuls(site, site.product_rows) + _weight_gradient(site)
    return max(multiplication + exposed * communication, HOST_SECONDS)


def ring_seconds(site: Site) -> float:
    """Predicted seconds of a one-way ring: of its steps and passes, or of its host if that is more.

    An all-reduce is a ring for its first half; the gather that follows is a collective.
    """
    after = 0.0
    if site.op == "matmul_all_reduce":
        after = COLLECTIVE_SECONDS + _bytes_sent_by_ring(site) / COLLECTIVE_BYTES_PER_SECOND
    return max(_ring_on_device(site), _ring_on_host(site)) + after


def _ring_on_device(site: Site) -> float:
    permutes = site.axis_size - 1
    bytes_at_once = _bytes_sent_by_ring(site) / max(permutes, 1)
    copy = COPY_SECONDS + bytes_at_once / COPY_BYTES_PER_SECOND
    multiply = _matmuls(site, site.product_rows // site.axis_size)
    steps = permutes * max(multiply, copy) + multiply
    return steps + _passes(site) + _weight_gradient(site)


def _ring_on_host(site: Site) -> float:
    permutes_per_step = 1 if site.rider is None else 2
    return HOST_SECONDS + (site.axis_size - 1) * permutes_per_step * HOST_SECONDS_PER_PERMUTE


def _bytes_sent_by_ring(site: Site) -> int:
    """Of an all-reduce, its first half."""
    return site.bytes_communicated // (2 if site.op == "matmul_all_reduce" else 1)


def matmul_seconds(rows: int, contracted: int, columns: int, itemsize: int = 2) -> float:
    """Predicted seconds of one matmul: limited by its waves of tiles, by power or by memory."""
    flops = 2 * rows * contracted * columns
    waves = min(
        _waves(math.ceil(rows / m) * math.ceil(columns / n))
        * (2 * m * n * contracted * MULTIPROCESSORS)
        / (share * PEAK_FLOPS_PER_SECOND)
        for m, n, share in TILES
    )
    moved = (rows * contracted + contracted * columns + rows * columns) * itemsize
    return KERNEL_SECONDS + max(
        waves, flops / SUSTAINED_FLOPS_PER_SECOND, moved / OPERAND_BYTES_PER_SECOND
    )


def _waves(tiles: int) -> float:
    """Tiles per multiprocessor, where few of them are each split along K among several."""
    splits = MULTIPROCESSORS // max(tiles, 1)
    return 1 / splits if splits else math.ceil(tiles / MULTIPROCESSORS)


def _matmuls(site: Site, rows: int) -> float:
    """Seconds of the site's matmuls on so many rows of every x."""
    itemsize = np.dtype(site.dtype).itemsize
    # Half-precision rates; wider numbers take as much longer as they are wider, or more.
    return (itemsize / 2) * sum(matmul_seconds(rows, *w) for _, w in site.operands)


def _weight_gradient(site: Site) -> float:
    if not site.has_weight_gradient:
        return 0.0
    itemsize = np.dtype(site.dtype).itemsize
    return (itemsize / 2) * sum(
        matmul_seconds(k, site.product_rows, n) for _, (k, n) in site.operands
    )


def _passes(site: Site) -> float:
    """Seconds of the passes over memory that a ring makes and bulk does not."""
    product = site.product_rows * site.columns
    chunks = site.axis_size
    itemsize = np.dtype(site.dtype).itemsize
    if site.op == "all_gather_matmul":
        # Every chunk of the product is read again and written into its place.
        elements, kernels = 2 * product, chunks * len(site.operands)
        if site.einsum is not None and site.einsum.accumulates:
            # Every chunk's product is as large as the result, and added to it in float32.
            elements = 2 * chunks * site.contracted * site.columns * 4 // itemsize
        if site.keep_gathered:
            elements, kernels = elements + 2 * site.product_rows * site.contracted, kernels + chunks
    else:
        # Every chunk of x is cut out; what arrives is added to all but the first.
        added = 3 * product * (chunks - 1) // chunks
        elements, kernels = 2 * site.rows * site.contracted + added, 2 * chunks - 1
        if site.rider is not None:
            elements, kernels = elements + 2 * chunks * math.prod(site.rider), kernels + chunks
    moved = elements * itemsize
    return kernels * KERNEL_SECONDS / 2 + moved / PASS_BYTES_PER_SECOND
