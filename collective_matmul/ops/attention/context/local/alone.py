"""Attention of one device by itself, by the kernel that the machine has."""

from __future__ import annotations

import jax

from collective_matmul.ops.attention.choice import decide, kernel_of
from collective_matmul.ops.attention.context.backend import SequenceShard
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import AttentionKernel, Gradients
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments, segments_of_ids


def kernel_for(request: ContextRequest, attention: AttentionRequest) -> AttentionKernel:
    """The kernel of a local attention: a requested one, or the fastest.

    Raises:
      ValueError: if none of the requested kernels can.
    """
    return kernel_of(decide(attention, request.kernels))


def attend_alone(request: ContextRequest, operands: SequenceShard) -> tuple[jax.Array, jax.Array]:
    """`ContextBackend.forward` on one device, which has the tokens in the order of positions."""
    attention, query, key, value, segments = _alone(request, operands)
    return kernel_for(request, attention).forward(query, key, value, segments, attention)


def gradients_alone(
    request: ContextRequest,
    operands: SequenceShard,
    out: jax.Array,
    log_sum_exp: jax.Array,
    cotangent: jax.Array,
) -> Gradients:
    """`ContextBackend.backward` on one device."""
    attention, query, key, value, segments = _alone(request, operands)
    return kernel_for(request, attention).backward(
        query, key, value, out, log_sum_exp, cotangent, segments, attention
    )


def _alone(
    request: ContextRequest, operands: SequenceShard
) -> tuple[AttentionRequest, jax.Array, jax.Array, jax.Array, Segments | None]:
    query, key, value, ids = operands
    segments = None
    if ids is not None and request.segments is not None:
        segments = segments_of_ids(ids, request.segments)
    attention = request.attention(
        queries=query.shape[1],
        keys=key.shape[1],
        heads=query.shape[2],
        key_value_heads=key.shape[2],
    )
    return attention, query, key, value, segments
