"""Predicted seconds of matmuls, for backends that have no closer model of their own."""

from __future__ import annotations

import math

import numpy as np

from collective_matmul.hardware import assumed_rates
from collective_matmul.ops.matmul.request import Site


def matmul_seconds(
    rows: int, contracted: int, columns: int, itemsize: int = 2, *, splits: bool = True
) -> float:
    """Predicted seconds of one matmul: limited by its waves of tiles, by power or by memory.

    `splits`: whether few tiles are each split along K among several multiprocessors, as XLA does.
    """
    gpu = assumed_rates()
    flops = 2 * rows * contracted * columns
    waves = min(
        _waves(math.ceil(rows / m) * math.ceil(columns / n), splits, gpu.multiprocessors)
        * (2 * m * n * contracted * gpu.multiprocessors)
        / (share * gpu.peak_flops)
        for m, n, share in gpu.tiles
    )
    moved = (rows * contracted + contracted * columns + rows * columns) * itemsize
    return gpu.kernel_seconds + max(waves, flops / gpu.sustained_flops, moved / gpu.operand_bytes)


def multiplication_seconds(site: Site) -> float:
    """Seconds of all matmuls of a site, undivided."""
    return matmuls_seconds(site, site.product_rows) + weight_gradient_seconds(site)


def matmuls_seconds(site: Site, rows: int) -> float:
    """Seconds of the site's matmuls on this number of rows of every x."""
    return slowdown(site) * sum(matmul_seconds(rows, *w) for _, w in site.operands)


def weight_gradient_seconds(site: Site) -> float:
    """Seconds of the weight gradients that belong to a site; 0 where it has none."""
    if not site.has_weight_gradient:
        return 0.0
    return slowdown(site, in_arrays=not site.format.packs_gradients) * sum(
        matmul_seconds(k, site.product_rows, n) for _, (k, n) in site.operands
    )


def slowdown(site: Site, *, in_arrays: bool = False) -> float:
    """Time of matmuls relative to aligned ones in half precision, in the site's format or arrays.

    Wider numbers take longer at least in proportion to their width.
    """
    width = None if in_arrays else site.format.relative_seconds
    if width is None:
        width = np.dtype(site.dtype).itemsize / 2
    return width * (1.0 if site.is_aligned else assumed_rates().unaligned_slowdown)


def _waves(tiles: int, splits: bool, multiprocessors: int) -> float:
    """Tiles per multiprocessor."""
    parts = multiprocessors // max(tiles, 1)
    return 1 / parts if splits and parts else math.ceil(tiles / multiprocessors)
