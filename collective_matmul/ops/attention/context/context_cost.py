"""Predicted seconds of attention over a sharded sequence.

Attention takes as long as the measured rate of its kernel says. Copies take as long as the link
says, and hide under what a backend computes meanwhile. In the forward pass of a layer that is the
projection of queries too, under which XLA starts two copies at once.
"""

from __future__ import annotations

import numpy as np

from collective_matmul.hardware import assumed_rates
from collective_matmul.ops.attention.choice import KERNELS, REFERENCE, decide, measured_rate
from collective_matmul.ops.attention.context.pieces import bytes_of_pieces, pieces_of
from collective_matmul.ops.attention.context.request import ContextRequest

#: The share of a matmul's rate that a kernel reaches which was not measured.
_SHARE = 0.7
#: Passes over float32 scores that XLA's attention takes, forward and backward.
_SCORE_PASSES = {"forward": 8, "backward": 16}

#: What a step of a ring costs beside its attention and its passes. On two H100, a backward pass by
#: the ring took 0.3 ms longer than by the gather, at 8,192 and at 32,768 tokens.
_STEP_SECONDS = {"forward": 50e-6, "backward": 150e-6}
#: Copies that XLA runs beside a matmul at the same time; further ones are synchronous.
_COPIES_AT_ONCE = 2


def attention_seconds(
    request: ContextRequest, pairs: int | None = None, tokens: int | None = None
) -> float:
    """Seconds of a pass of the fastest local kernel.

    Args:
      request: the request.
      pairs: of a query and a key, in each sequence; None: those of the request.
      tokens: of a call, which its rate depends on; None: those of the request.
    """
    name = kernel_name(request)
    if name == REFERENCE:
        return masked_seconds(request, pairs)
    tokens = request.tokens if tokens is None else tokens
    attention = request.attention(queries=tokens, keys=tokens)
    pairs = request.pairs if pairs is None else pairs
    flops = 4 * request.batch * request.heads * request.head_size * pairs
    rate = measured_rate(attention, name)
    if rate is None:
        rate = _SHARE * assumed_rates().sustained_flops
        flops *= 1 if request.direction == "forward" else 2.5
    return assumed_rates().kernel_seconds + flops / rate


def masked_seconds(request: ContextRequest, pairs: int | None = None) -> float:
    """Seconds of XLA's attention, which has scores in memory, also those that are masked."""
    gpu = assumed_rates()
    pairs = request.tokens * request.length if pairs is None else pairs
    scores = 4 * request.batch * request.heads * pairs
    products = 2 if request.direction == "forward" else 5
    flops = 2 * products * request.batch * request.heads * request.head_size * pairs
    passes = _SCORE_PASSES[request.direction] * scores / gpu.pass_bytes
    return gpu.kernel_seconds + passes + flops / (_SHARE * gpu.sustained_flops)


def kernel_name(request: ContextRequest) -> str:
    """The name of the local kernel."""
    return decide(request.attention(), request.kernels).implementation


def uses_masks(request: ContextRequest) -> bool:
    """Whether keys of other devices are attended to by XLA, with masks made of positions."""
    has_masks = request.window is not None or request.segments is not None
    return has_masks and not KERNELS[kernel_name(request)].takes_parts


def xla_seconds(request: ContextRequest) -> float:
    """Collectives, and then attention with masks."""
    return request.communication_seconds + masked_seconds(request)


def gather_seconds(request: ContextRequest) -> float:
    """Copies, some of which hide under the attention to the own keys; and attention."""
    copies = _copies_seconds(bytes_of_pieces(request), request)
    kernel = KERNELS[kernel_name(request)]
    if uses_masks(request):
        keys = len(pieces_of(request)) * request.chunks.size
        attention = masked_seconds(request, request.tokens * keys)
    elif kernel.takes_parts:
        # Keys are written and read once more, and their gradients too.
        keys = 2 * request.axis_size * request.bytes_of_keys / assumed_rates().pass_bytes
        attention = attention_seconds(request) + keys
        copies -= _hidden_under_projection(request, copies)
    else:
        attention = attention_seconds(request, _pairs_of_blocks(request), request.chunks.size)
        attention += _merging_seconds(request)
        copies = max(0.0, copies - attention / request.axis_size)
    # Gradients of keys come home when all is computed.
    home = (
        0.0
        if request.direction == "forward"
        else _copies_seconds(bytes_of_pieces(request), request)
    )
    return copies + attention + home


def ring_seconds(request: ContextRequest) -> float:
    """Each step takes as long as its attention, or as its copies."""
    devices = request.axis_size
    if uses_masks(request):
        attention = masked_seconds(request)
    else:
        attention = attention_seconds(request, _pairs_of_blocks(request), request.chunks.size)
    launches = _STEP_SECONDS[request.direction] * devices
    step = (attention + launches + _merging_seconds(request)) / devices
    copy = _copies_seconds((devices - 1) * request.bytes_of_keys, request) / (devices - 1)
    last = copy if request.direction == "backward" else 0.0
    sent = copy * (1 if request.direction == "forward" else 2)
    return step + (devices - 1) * max(step, sent) + last


def ulysses_seconds(request: ContextRequest) -> float:
    """Exchanges, which nothing hides, and attention to whole sequences."""
    devices = request.axis_size
    if not request.causal:
        pairs = request.length**2
    else:
        window = request.length if request.window is None else request.window
        pairs = window * (window + 1) // 2 + (request.length - window) * window
    attention = attention_seconds(request, pairs // devices)
    moved = bytes_of_exchanges(request)
    passes = 4 * moved / assumed_rates().pass_bytes
    return attention + _copies_seconds(moved, request, exchanges=2) + passes


def bytes_of_exchanges(request: ContextRequest) -> int:
    """Bytes that each device sends in the exchanges of heads, numbers of segments left out.

    Forward: queries, keys and values go, the result and its log-sum-exp come back. Backward: all of
    these go, and the gradient of the result; three gradients come back.
    """
    tokens = request.batch * request.tokens
    row = request.head_size * np.dtype(request.dtype).itemsize
    queries = tokens * request.heads * row
    wide = tokens * request.heads * (8 if np.dtype(request.dtype).itemsize == 8 else 4)
    if request.direction == "forward":
        total = 2 * queries + request.bytes_of_keys + wide
    else:
        total = 4 * queries + 2 * request.bytes_of_keys + wide
    return total * (request.axis_size - 1) // request.axis_size


def _copies_seconds(sent: int, request: ContextRequest, exchanges: int = 1) -> float:
    gpu = assumed_rates()
    return exchanges * (request.axis_size - 1) * gpu.copy_seconds + sent / gpu.link_bytes


def _hidden_under_projection(request: ContextRequest, copies: float) -> float:
    """The part of a gather's seconds that the projection of queries hides.

    A token is assumed to have as many features as its query heads have together.
    """
    if request.direction == "backward":
        return 0.0
    features = request.heads * request.head_size
    rate = assumed_rates().sustained_flops
    projection = 2 * request.batch * request.tokens * features**2 / rate
    return min(projection, copies * min(1.0, _COPIES_AT_ONCE / (request.axis_size - 1)))


def _pairs_of_blocks(request: ContextRequest) -> int:
    """Pairs of blocks of static shapes, which the contiguous layout does not balance."""
    if request.causal and request.chunks.local == 2:
        return request.pairs
    own = request.tokens * (request.tokens + 1) // 2 if request.causal else request.tokens**2
    return own + (request.axis_size - 1) * request.tokens**2


def _merging_seconds(request: ContextRequest) -> float:
    """Seconds of the merges, or of the sums of gradients: passes over float32 of the queries."""
    numbers = request.batch * request.tokens * request.heads * request.head_size
    return 10 * request.axis_size * numbers / assumed_rates().pass_bytes
