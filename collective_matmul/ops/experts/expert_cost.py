"""Predicted seconds of expert ops."""

from __future__ import annotations

import numpy as np

from collective_matmul.hardware import assumed_rates
from collective_matmul.ops.experts.request import ExpertRequest

#: The share of a matmul's rate that grouped matmuls reach.
_GROUPED_SHARE = 0.75
#: Pieces in which the last result of a forward pass goes home.
LAST_PIECES = 2
#: Seconds from the end of a predicate's computation to the start of the branch that it selects,
#: which the host launches. An estimate: not measured.
_BRANCH_SECONDS = 30e-6
#: The gain that a prediction must exceed where NCCL executes permutes: none was measured.
NCCL_ERROR = 0.25
#: Kernels that find out which token travels where.
_SLOT_KERNELS = 10


def compute_seconds(request: ExpertRequest, visits: int = 1) -> float:
    """Seconds of the products, and of reading all weights in every visit."""
    gpu, itemsize = assumed_rates(), np.dtype(request.dtype).itemsize
    flops = request.flops / (_GROUPED_SHARE * gpu.sustained_flops) * (itemsize / 2)
    matrices = request.products * request.local_experts * request.width * request.hidden * itemsize
    rows = request.products * request.pairs * (request.width + request.hidden) * itemsize
    moved = (visits * matrices + rows) / gpu.operand_bytes
    return visits * request.products * gpu.kernel_seconds + max(flops, moved)


def ring_seconds(request: ExpertRequest) -> float:
    """Seconds of a ring: each step takes as long as its computation, or as its copies."""
    gpu, devices = assumed_rates(request.transport), request.axis_size
    work = compute_seconds(request, visits=devices) / devices
    copies = gpu.copy_seconds + request.bytes_communicated / (devices - 1) / gpu.link_bytes
    routing = gpu.copy_seconds * (devices - 1)
    last = gpu.copy_seconds
    if request.direction == "forward":
        last += request.bytes_of_tokens / gpu.link_bytes / LAST_PIECES
    exposed = gpu.permute_exposed_seconds + gpu.permute_exposed_share * copies
    return routing + work + (devices - 1) * (max(work, copies) + exposed) + last


def exchange_seconds(request: ExpertRequest, capacity: int) -> float:
    """Seconds of an exchange in which a device sends `capacity` tokens to each other one.

    Nothing hides its copies: branches have them.
    """
    gpu, others = assumed_rates(request.transport), request.axis_size - 1
    forward = request.direction == "forward"
    share = capacity / request.tokens
    # Forward: routings, tokens and sums. Backward: tokens with gradients, and two kinds of sums.
    launches = (3 if forward else 4) * others * gpu.copy_seconds
    launches += (3 if forward else 2) * _BRANCH_SECONDS
    launches += _SLOT_KERNELS * gpu.kernel_seconds if forward else 0
    # Blocks are written and read, and what arrives is written to arrays for all tokens.
    rows = 2 * others * share + request.axis_size
    passes = (2 if forward else 3) * rows * request.bytes_of_tokens / gpu.pass_bytes
    copies = request.bytes_communicated * share / gpu.link_bytes
    return compute_seconds(request) + launches + passes + copies
