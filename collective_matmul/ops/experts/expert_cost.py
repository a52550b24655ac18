"""Predicted seconds of expert ops.

Operands in a format are converted, and their products take as long, compared with those of arrays,
as the fastest grouped matmul is predicted to. Both cost the same whatever sends the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collective_matmul.hardware import assumed_rates, rates
from collective_matmul.operands.format import PLAIN
from collective_matmul.ops.experts.grouped.request import GROUPED_BACKENDS, GroupedRequest
from collective_matmul.ops.experts.request import ExpertRequest

#: The share of a matmul's rate that grouped matmuls reach.
_GROUPED_SHARE = 0.75
#: Pieces in which the last result of a forward pass goes home.
LAST_PIECES = 2
#: Seconds from the end of a predicate's computation to the start of the branch that it selects,
#: which the host launches. An estimate: not measured.
_BRANCH_SECONDS = 30e-6
#: Kernels that find out which token travels where.
_SLOT_KERNELS = 10


def compute_seconds(request: ExpertRequest, visits: int = 1) -> float:
    """Seconds of the products, and of reading all weights in every visit."""
    gpu, itemsize = assumed_rates(), np.dtype(request.dtype).itemsize
    flops = request.flops / (_GROUPED_SHARE * gpu.sustained_flops) * (itemsize / 2)
    in_format = 1 - request.weight_gradients / request.products
    flops *= 1 + in_format * (_relative_seconds(request) - 1)
    matrices = request.products * request.local_experts * request.width * request.hidden * itemsize
    rows = request.products * request.pairs * (request.width + request.hidden) * itemsize
    moved = (visits * matrices + rows) / gpu.operand_bytes
    launches = visits * request.products * gpu.kernel_seconds
    return launches + max(flops, moved) + _conversion_seconds(request)


def _relative_seconds(request: ExpertRequest) -> float:
    """Predicted seconds of products in the format of a request, relative to those of arrays."""
    if request.format == PLAIN or rates() is None:
        return 1.0
    up = GroupedRequest(
        op="grouped_matmul",
        all_rows=request.pairs * request.expert_devices,
        used_rows=request.pairs,
        contracted=request.width,
        columns=request.hidden,
        groups=request.local_experts,
        dtype=request.dtype,
        format=request.format,
    )
    down = replace(up, contracted=request.hidden, columns=request.width)
    products = [up, up, down]
    arrays = [replace(product, format=PLAIN) for product in products]
    return _fastest_seconds(products) / _fastest_seconds(arrays)


def _fastest_seconds(products: Sequence[GroupedRequest]) -> float:
    """The sum of the products' seconds, each with the backend that is predicted to be fastest."""
    predictions = ([b.predict(each) for b in GROUPED_BACKENDS.values()] for each in products)
    return sum(min(p.seconds for p in found if p is not None) for found in predictions)


def _conversion_seconds(request: ExpertRequest) -> float:
    """Seconds of the passes that convert operands to a format.

    Hidden features and their gradients are converted where they are computed, and only written.
    """
    if request.format == PLAIN:
        return 0.0
    forward, gpu = request.direction == "forward", assumed_rates()
    matrix = request.local_experts * request.width * request.hidden
    matrices = matrix * (3 if forward or request.keeps_hidden else 5)
    tokens = request.axis_size * request.tokens * request.width * (1 if forward else 2)
    rows = request.pairs * request.hidden * (1 if forward else 2)
    # Numbers are read to find scales, read again, and written in 8 bits.
    bytes_of_number = 2 * np.dtype(request.dtype).itemsize + 1
    return ((matrices + tokens) * bytes_of_number + rows) / gpu.pass_bytes


def ring_seconds(request: ExpertRequest) -> float:
    """Seconds of a ring: each step takes as long as its computation, or as its copies."""
    gpu, devices = assumed_rates(), request.axis_size
    work = compute_seconds(request, visits=devices) / devices
    copies = gpu.copy_seconds + request.bytes_communicated / (devices - 1) / gpu.link_bytes
    routing = gpu.copy_seconds * (devices - 1)
    last = gpu.copy_seconds
    if request.direction == "forward":
        last += request.bytes_of_results / gpu.link_bytes / LAST_PIECES
    return routing + work + (devices - 1) * max(work, copies) + last


def exchange_seconds(request: ExpertRequest, capacity: int) -> float:
    """Seconds of an exchange in which a device sends `capacity` tokens to each other one.

    Nothing hides its copies: branches have them.
    """
    gpu, others, forward = assumed_rates(), request.axis_size - 1, request.direction == "forward"
    share = capacity / request.tokens
    # Forward: routings, tokens and sums. Backward: tokens with gradients, and two kinds of sums.
    launches = (3 if forward else 4) * others * gpu.copy_seconds
    launches += (3 if forward else 2) * _BRANCH_SECONDS
    launches += _SLOT_KERNELS * gpu.kernel_seconds if forward else 0
    # Blocks are written and read, and what arrives is written to arrays for all tokens.
    rows = 2 * others * share + request.axis_size
    blocks = (1 if forward else 2) * request.bytes_of_tokens + request.bytes_of_results
    passes = rows * blocks / gpu.pass_bytes
    copies = request.bytes_communicated * share / gpu.link_bytes
    return compute_seconds(request) + launches + passes + copies
