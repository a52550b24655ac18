"""Numbers that a block's forward leaves for its backward, by what is recomputed.

Stream is the residual stream of a device, [local_rows, features]; gathered is that of its tensor
group, [rows, features].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.blocks.rematerialization import recomputes_feed_forward
from train.config.config import Config
from train.config.experts import expert_devices
from train.plan.rings import gathers_in_matmuls, leaves_matmuls_to_xla
from train.plan.shapes import Shapes

#: Kernels of attention, as `Config.attention` names them, that store all scores.
_STORES_SCORES = ("xla",)


class Activations(NamedTuple):
    """Bytes of a block on a device, of one microbatch.

    Attributes:
      saved: what its forward leaves.
      recomputed: what its backward makes again before it begins, or takes out of arrays of all
        blocks.
      temporary: gradients within it, and what waits for gradients of weights.
    """

    saved: float
    recomputed: float
    temporary: float


def block_activations(shapes: Shapes) -> Activations:
    """The activations of a block."""
    config, model = shapes.config, shapes.model
    width = np.dtype(config.compute_dtype).itemsize
    rows, stream = shapes.rows, shapes.local_rows * model.features * width
    queries, keys = shapes.attention_columns
    attended = rows * queries * width + 4 * rows * queries / model.head_dim  # Log-sum-exps.
    projected = rows * (queries + 2 * keys) * width
    normed = rows * (queries + keys) * width if model.query_key_norm else 0
    hidden = rows * shapes.hidden * width
    experts = _experts(shapes, width)
    again = _experts_again(shapes, width)
    everything = 4 * stream + projected + normed + attended + 3 * hidden + experts
    everything -= _not_read(shapes, width)
    left = everything - _in_8_bits(shapes, width)
    results = 2 * stream + projected + attended
    saved = {
        "none": left,
        "dots": results + 2 * hidden + experts,
        "projections": results,
        "attention": stream + attended,
        "full": stream,
    }[config.remat]
    temporary = 2 * hidden + experts + again + _scores(shapes)
    if model.num_experts is not None:  # The tokens of all devices, their results and gradients.
        temporary += 4 * expert_devices(config, shapes.sizes) * stream
    temporary += _waiting(shapes, hidden, width)
    if not config.scan_layers:
        return Activations(saved, everything - saved, temporary)
    if config.remat != "none":  # A loop takes what was saved of a block out of the arrays of all.
        return Activations(saved, everything, temporary)
    # Results of attention are kept twice, for the gradients of attention and of its projection.
    return Activations(saved + attended, everything - hidden, temporary)


def _not_read(shapes: Shapes, width: int) -> float:
    """Bytes of operands of linear layers that no gradient of weights reads. Those of the output
    projection of attention stay for attention."""
    linears = shapes.block[:1] + shapes.block[2:]
    return width * sum(shapes.operand(each) for each in linears if not each.trained_weights)


def _in_8_bits(shapes: Shapes, width: int) -> float:
    """Bytes that operands of linear layers take less where the backward finds them in 8 bits."""
    if shapes.config.fp8 != "tensorwise":
        return 0.0
    linears = shapes.block[:1] + shapes.block[2:]
    kept = (each for each in linears if each.fp8 and each.trained_weights)
    return (width - 1) * sum(map(shapes.operand, kept))


def _scores(shapes: Shapes) -> float:
    """Bytes of the scores of attention where XLA computes it: in float32, as its kernels are for
    the other dtypes, or where it is asked for. The backward has them, their gradients, and both in
    the compute dtype."""
    config = shapes.config
    if config.attention not in _STORES_SCORES and config.compute_dtype != "float32":
        return 0.0
    heads = shapes.attention_columns[0] // shapes.model.head_dim
    scores = shapes.rows * heads * (config.sequence_length // shapes.sizes.context)
    return scores * (8 if config.compute_dtype == "float32" else 10)


def _waiting(shapes: Shapes, hidden: float, width: int) -> float:
    """Bytes of what waits for gradients of weights, which XLA computes late."""
    config, tensor = shapes.config, shapes.sizes.tensor
    if shapes.microbatches > 1 and not config.scan_layers:
        return 0.0
    gathered = shapes.rows * shapes.model.features * width
    is_tensorwise = config.fp8 == "tensorwise"
    has_rings = not (is_tensorwise or leaves_matmuls_to_xla(config))
    arrays = 0 if tensor == 1 else 5
    if has_rings:  # Those of two devices are not always faster.
        arrays = 2 if tensor == 2 and not config.fp8 else 0
    waiting = arrays * gathered
    in_rings = has_rings and (
        (tensor > 1 and not arrays) or (shapes.zero == 3 and gathers_in_matmuls(shapes))
    )
    if in_rings or not _outlives_its_block(shapes):
        return waiting
    # Hidden features and their gradients stay, and what is gathered and scattered around them.
    pairs = recomputes_feed_forward(config.remat) + (not is_tensorwise)
    return waiting + 2 * pairs * hidden + 3 * gathered


def _outlives_its_block(shapes: Shapes) -> bool:
    """Whether gradients of weights of a block are complete when the backward of the next one is."""
    config = shapes.config
    is_trained = any(linear.trained_weights for linear in shapes.block[2:])
    return is_trained and config.remat != "none" and not config.scan_layers


def sums_of_attention(shapes: Shapes) -> float:
    """Bytes that FlashAttention-3's backward allocates beside XLA's plan: float32 gradients."""
    if shapes.config.attention != "flash3":
        return 0.0
    (queries, keys), context = shapes.attention_columns, shapes.sizes.context
    # Two chunks of a device attend to 2 D + 1 chunks of the sequence, of 2 D, over D devices.
    seen = shapes.rows * (1 if context == 1 else context + 0.5)
    return 4 * (shapes.rows * queries + (2 * seen * keys if queries != keys else 0))


def _repeats_experts(config: Config) -> bool:
    return config.recompute_expert_hidden or recomputes_feed_forward(config.remat)


def _experts_again(shapes: Shapes, width: int) -> float:
    """Bytes of hidden features of a block's experts where the backward computes them again: of all
    devices at first, then gradients and rows of one device after the other."""
    config = shapes.config
    if not _repeats_experts(config):
        return 0.0
    arrays = expert_devices(config, shapes.sizes) + 4
    columns = arrays * shapes.expert_hidden + 2 * shapes.model.features
    return shapes.expert_pairs * columns * width


def _experts(shapes: Shapes, width: int) -> float:
    """Bytes of gate and up of a block's experts, of all pairs that may come to a device."""
    config = shapes.config
    if _repeats_experts(config):
        return 0.0
    devices = expert_devices(config, shapes.sizes)
    return 2 * shapes.expert_pairs * devices * shapes.expert_hidden * width
