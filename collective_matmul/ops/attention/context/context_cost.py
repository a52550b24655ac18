"""Predicted seconds of attention over a sharded sequence."""

from __future__ import annotations

from collective_matmul.hardware import assumed_rates
from collective_matmul.ops.attention.context.request import ContextRequest

#: The share of a matmul's rate that attention reaches.
_SHARE = 0.8


def attention_seconds(request: ContextRequest) -> float:
    """Seconds of the attention of the device that has most of it."""
    gpu = assumed_rates()
    return gpu.kernel_seconds + request.flops / (_SHARE * gpu.sustained_flops)
