"""Seconds that each implementation takes by prediction, for sites that no measurement is near to.

The constants are of Hopper GPUs joined by NVLink and NVSwitch, measured inside compiled stacks of
bfloat16 layers on two and on four H200. There the chip is limited by its power: whatever lets the
tensor cores rest lets the next matmul run faster. So a pass over memory, or a collective, adds less
to a stack than it takes alone, and a full wave of tiles runs faster than matmuls do in the long
run. Of few rows the host decides, which launches everything.

The ring is the one-way one, as it is carried out: by the kernels that multiply chunks where they
lie or, where those cannot, by XLA's matmuls with passes that cut chunks out and put them in place.
A fused kernel is as fast as its plan predicts, give or take what stacks add.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np

from collective_matmul._compat import partly_automatic
from collective_matmul.dispatch.exchanges import exchange_seconds
from collective_matmul.dispatch.fused_kernels import planned_seconds
from collective_matmul.dispatch.lookup import Prediction
from collective_matmul.mosaic_gpu.tiling import Problem, choose_tiles
from collective_matmul.site import Site

#: As JAX names the GPUs that the constants are true of.
DEVICE_KINDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")

#: A ring must be predicted to gain this much over bulk: of aligned ones that were measured to be
#: slower, and not for want of their host, up to 4.9 % is predicted. Rings that do gain are
#: overrated by more, by up to a sixth.
MARGIN = 0.08
#: The same where the ring waits for its host, which takes from 0.65 to 1.4 times what is predicted:
#: of rings that were slower than bulk up to 22 % are predicted. And of what was not measured: wide
#: numbers, and unaligned matmuls, which XLA carries out in ways that differ from shape to shape.
UNSURE_MARGIN = 0.25

#: The same of a fused kernel: predictions are off by a tenth, bulk's of few rows by up to a fifth,
#: and sums of few rows are up to 60 % too slow.
FUSED_MARGIN = 0.15
#: And of one-shot collectives.
ONE_SHOT_MARGIN = 0.15

MULTIPROCESSORS = 132
#: Rows and columns of a tile of a matmul, and its share of the peak rate.
TILES = ((128, 256, 1.0), (128, 128, 0.75), (64, 128, 0.5))
PEAK_FLOPS_PER_SECOND = 8.4e14
SUSTAINED_FLOPS_PER_SECOND = 6.2e14
OPERAND_BYTES_PER_SECOND = 4.0e12
KERNEL_SECONDS = 4e-6

#: A matmul whose rows no copy engine brings to the tensor cores takes about so many times as long.
UNALIGNED_SLOWDOWN = 2.0

#: Of a GPU's links, in one direction: copies and collectives alike.
LINK_BYTES_PER_SECOND = 3.76e11
COLLECTIVE_SECONDS = 28e-6
COPY_SECONDS = 10e-6
PASS_BYTES_PER_SECOND = 6.5e12
#: What the host takes for an op, however it is carried out; on top for each permute, at which the
#: threads that drive the devices meet; and in each of these steps for each x and w but the first.
HOST_SECONDS = 40e-6
HOST_SECONDS_PER_PERMUTE = 50e-6
HOST_SECONDS_PER_OPERAND = 12e-6

#: In a stack a fused kernel takes so many times what is planned, for which it runs alone on a cool
#: GPU; and so many seconds more to begin.
FUSED_SLOWDOWN = 1.05
FUSED_SECONDS = 4e-6


def predict(site: Site, fused: bool = False) -> Prediction:
    """What the model says of bulk and of the ring, which is limited by its GPU or by its host.

    An all-reduce is a ring for its first half; the gather that follows is a collective.

    Args:
      site: what is to be predicted.
      fused: whether to say it of the fused kernel too, which there must be.
    """
    on_device, on_host = _ring_on_device(site), _ring_on_host(site)
    after = 0.0
    if site.op == "matmul_all_reduce":
        after = COLLECTIVE_SECONDS + _bytes_sent_by_ring(site) / LINK_BYTES_PER_SECOND
    ring = max(on_device, on_host)
    seconds = {"xla": reference_seconds(site), "ring": ring + after}
    if fused:
        seconds["fused"] = fused_seconds(site)
    was_measured = site.is_aligned and site.dtype.itemsize == 2
    margin = MARGIN if was_measured else UNSURE_MARGIN
    at_most = max((1 + margin) * on_device, (1 + UNSURE_MARGIN) * on_host)
    margins = {"fused": FUSED_MARGIN}
    return Prediction(seconds, at_most / ring - 1, "cost model", margins=margins)


def predict_one_shot(site: Site) -> Prediction:
    """What the model says of bulk, and of the same with one-shot collectives, which can do it."""
    one_shot = _multiplication(site) + exchange_seconds(site)
    seconds = {"xla": reference_seconds(site), "one_shot": one_shot}
    return Prediction(seconds, ONE_SHOT_MARGIN, "cost model")


def reference_seconds(site: Site) -> float:
    """Predicted seconds of the collectives and the matmuls, one after the other, or of the host."""
    collectives = 1 if site.co_gathered is None else 2
    communication = (
        collectives * COLLECTIVE_SECONDS + site.bytes_communicated / LINK_BYTES_PER_SECOND
    )
    return max(_multiplication(site) + communication, HOST_SECONDS)


def fused_seconds(site: Site) -> float:
    """Predicted seconds of the fused kernel, which is planned for this.

    What rides is gathered by a collective before.
    """
    riding = 0.0
    if site.co_gathered is not None:
        riding = COLLECTIVE_SECONDS + site.co_gathered_bytes / LINK_BYTES_PER_SECOND
    sending = (site.bytes_communicated - site.co_gathered_bytes) / LINK_BYTES_PER_SECOND
    on_device = max(FUSED_SLOWDOWN * planned_seconds(site), sending)
    return on_device + FUSED_SECONDS + riding + _weight_gradient(site)


def _ring_on_device(site: Site) -> float:
    permutes = site.axis_size - 1
    bytes_at_once = _bytes_sent_by_ring(site) / max(permutes, 1)
    copy = COPY_SECONDS + bytes_at_once / LINK_BYTES_PER_SECOND
    multiply = _chunk_matmuls(site, site.product_rows // site.axis_size)
    steps = permutes * max(multiply, copy) + multiply
    return steps + _passes(site) + _weight_gradient(site)


def _ring_on_host(site: Site) -> float:
    permutes = 1 if site.co_gathered is None else 2
    operands = len(site.operands) - 1
    step = permutes * HOST_SECONDS_PER_PERMUTE + operands * HOST_SECONDS_PER_OPERAND
    return HOST_SECONDS + (site.axis_size - 1) * step


def _bytes_sent_by_ring(site: Site) -> int:
    """Of an all-reduce, its first half."""
    return site.bytes_communicated // (2 if site.op == "matmul_all_reduce" else 1)


def matmul_seconds(
    rows: int, contracted: int, columns: int, itemsize: int = 2, *, splits: bool = True
) -> float:
    """Predicted seconds of one matmul: limited by its waves of tiles, by power or by memory.

    `splits`: whether few tiles are each split along K among several multiprocessors, as XLA does.
    """
    flops = 2 * rows * contracted * columns
    waves = min(
        _waves(math.ceil(rows / m) * math.ceil(columns / n), splits)
        * (2 * m * n * contracted * MULTIPROCESSORS)
        / (share * PEAK_FLOPS_PER_SECOND)
        for m, n, share in TILES
    )
    moved = (rows * contracted + contracted * columns + rows * columns) * itemsize
    return KERNEL_SECONDS + max(
        waves, flops / SUSTAINED_FLOPS_PER_SECOND, moved / OPERAND_BYTES_PER_SECOND
    )


def _waves(tiles: int, splits: bool) -> float:
    """Tiles per multiprocessor."""
    parts = MULTIPROCESSORS // max(tiles, 1)
    return 1 / parts if splits and parts else math.ceil(tiles / MULTIPROCESSORS)


def _multiplication(site: Site) -> float:
    """Seconds of all matmuls of a site, undivided."""
    return _matmuls(site, site.product_rows) + _weight_gradient(site)


def _matmuls(site: Site, rows: int) -> float:
    """Seconds of the site's matmuls on so many rows of every x."""
    return _slowdown(site) * sum(matmul_seconds(rows, *w) for _, w in site.operands)


def _chunk_matmuls(site: Site, rows: int) -> float:
    """Seconds of a chunk's: a kernel that works in place has all of them in the same waves."""
    if not _multiplies_in_place(site):
        return _matmuls(site, rows)
    return _slowdown(site) * matmul_seconds(rows, site.contracted, site.columns, splits=False)


def _weight_gradient(site: Site) -> float:
    if not site.has_weight_gradient:
        return 0.0
    return _slowdown(site) * sum(
        matmul_seconds(k, site.product_rows, n) for _, (k, n) in site.operands
    )


def _slowdown(site: Site) -> float:
    """How many times as long matmuls take as aligned ones in half precision.

    Wider numbers take as much longer as they are wider, or more.
    """
    return np.dtype(site.dtype).itemsize / 2 * (1.0 if site.is_aligned else UNALIGNED_SLOWDOWN)


def _passes(site: Site) -> float:
    """Seconds of the passes over memory that a ring makes and bulk does not."""
    elements, kernels = (0, 0) if _multiplies_in_place(site) else _copies(site)
    if site.op != "all_gather_matmul":
        # What arrives is added to all chunks but the first.
        steps = site.axis_size - 1
        product = site.product_rows * site.columns
        elements, kernels = elements + 3 * product * steps // site.axis_size, kernels + steps
    moved = elements * np.dtype(site.dtype).itemsize
    return kernels * KERNEL_SECONDS / 2 + moved / PASS_BYTES_PER_SECOND


def _copies(site: Site) -> tuple[int, int]:
    """Elements read and written by copies between chunks and whole arrays, in so many kernels."""
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


def _multiplies_in_place(site: Site) -> bool:
    """Whether the ring's matmuls are the kernels', which read and write chunks where they lie."""
    half_precision = site.dtype in (jnp.bfloat16, jnp.float16)
    if site.einsum is not None or not half_precision or partly_automatic():
        return False
    x, _ = site.operands[0]
    planes = math.prod(x[: site.dimension or 0])
    ks, ns = zip(*(w for _, w in site.operands), strict=True)
    if site.op == "all_gather_matmul":
        rows, ks = site.rows, ks[:1]
    else:
        rows, ns = site.rows // site.axis_size, ns[:1]
    w_contracted = 2 if site.transpose_w else 1
    return _has_kernel(Problem(planes, rows // planes, ks, ns, w_contracted=w_contracted))


@functools.cache
def _has_kernel(problem: Problem) -> bool:
    return choose_tiles(problem) is not None
