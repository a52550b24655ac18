"""What devices send each other at a site that is carried out with one-shot collectives."""

from __future__ import annotations

import math

import jax

from collective_matmul.backends.one_shot import exchange_kernel
from collective_matmul.site import Site


def why_not(site: Site) -> str | None:
    """Why one-shot collectives cannot do it, in words; None if they can."""
    reasons = (exchange_kernel.unsupported_reason(array, site.axis_size) for array in _sent(site))
    return next(filter(None, reasons), None)


def exchange_seconds(site: Site) -> float:
    """What the exchanges should take, of sites that one-shot collectives can do."""
    sizes = (math.prod(array.shape) * site.dtype.itemsize for array in _sent(site))
    return sum(exchange_kernel.predicted_seconds(size, site.axis_size) for size in sizes)


def _sent(site: Site) -> list[jax.ShapeDtypeStruct]:
    """What each device sends to each other one, exchange by exchange."""
    x, (_, columns) = site.operands[0]
    product = math.prod(x[:-1]) * columns
    share = math.ceil(product / site.axis_size)
    if site.op == "all_gather_matmul":
        shapes = [x]
    elif site.op == "matmul_reduce_scatter":
        shapes = [(share,)] + ([] if site.co_gathered is None else [site.co_gathered])
    elif exchange_kernel.is_two_shot(product * site.dtype.itemsize, site.axis_size):
        shapes = [(share,)] * 2
    else:
        shapes = [(product,)]
    return [jax.ShapeDtypeStruct(shape, site.dtype) for shape in shapes]
