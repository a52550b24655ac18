"""Numbers that a block's forward leaves for its backward, by what is recomputed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.blocks.rematerialization import recomputes_feed_forward
from train.config.experts import expert_devices
from train.plan.shapes import Shapes


class Activations(NamedTuple):
    """Bytes of a block on a device, of one microbatch.

    Attributes:
      saved: what its forward leaves.
      recomputed: what its backward makes again before it begins.
      temporary: gradients within it.
    """

    saved: float
    recomputed: float
    temporary: float


def block_activations(shapes: Shapes) -> Activations:
    """The activations of a block."""
    config, model = shapes.config, shapes.model
    width = np.dtype(config.compute_dtype).itemsize
    rows, local = shapes.rows, shapes.local_rows
    queries, keys = shapes.attention_columns
    stream = local * model.features * width
    attended = rows * queries * width + 4 * rows * queries / model.head_dim  # Log-sum-exps.
    projected = rows * (queries + 2 * keys) * width
    normed = rows * (queries + keys) * width if model.query_key_norm else 0
    hidden = rows * shapes.hidden * width
    experts = _experts(shapes, width)
    everything = 4 * stream + projected + normed + attended + 3 * hidden + experts
    if config.fp8 == "tensorwise":  # The backward takes operands in 8 bits.
        for linear in shapes.block[:1] + shapes.block[2:]:
            operand = (local if linear.gathers else rows) * linear.inputs
            everything -= operand * (width - 1) if linear.fp8 else 0
    temporary = 2 * hidden + experts
    if model.num_experts is not None:  # The tokens of all devices, their results and gradients.
        temporary += 4 * expert_devices(config, shapes.sizes) * stream
    if config.remat == "none":
        return Activations(everything, 0, temporary)
    if recomputes_feed_forward(config.remat) and not config.scan_layers:
        # Weight gradients of a block are complete when the backward of the next one is: hidden
        # features and their gradients stay, and what is gathered and scattered around them.
        temporary += 4 * hidden + 3 * rows * model.features * width
    if config.remat == "full":
        return Activations(stream, everything, temporary)
    if config.remat == "attention":
        return Activations(stream + attended, everything - attended, temporary)
    if config.remat == "projections":
        results = 2 * stream + projected + attended
        return Activations(results, everything - results, temporary)
    results = 2 * stream + projected + attended + 2 * hidden + experts
    return Activations(results, everything - results, temporary)


def sums_of_attention(shapes: Shapes) -> float:
    """Bytes that FlashAttention-3's backward allocates beside XLA's plan: float32 gradients."""
    if shapes.config.attention != "flash3":
        return 0.0
    (queries, keys), context = shapes.attention_columns, shapes.sizes.context
    # Two chunks of a device attend to 2 D + 1 chunks of the sequence, of 2 D, over D devices.
    seen = shapes.rows * (1 if context == 1 else context + 0.5)
    return 4 * (shapes.rows * queries + (2 * seen * keys if queries != keys else 0))


def _experts(shapes: Shapes, width: int) -> float:
    """Bytes of gate and up of a block's experts, of all pairs that may come to a device."""
    config = shapes.config
    if config.recompute_expert_hidden or recomputes_feed_forward(config.remat):
        return 0.0
    devices = expert_devices(config, shapes.sizes)
    return 2 * shapes.expert_pairs * devices * shapes.expert_hidden * width
