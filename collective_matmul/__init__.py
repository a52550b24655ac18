"""Collective matmuls: tensor-parallel communication hidden under the matmuls that need it."""

from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.registry import UnknownBackendError
from collective_matmul.dispatch.selection import UnsupportedSiteError
from collective_matmul.explain import explain
from collective_matmul.jit.compiler import overlap_jit
from collective_matmul.jit.xla_options import OVERLAP_OPTIONS
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.recipes.recipe import SCALE_CHECKPOINT_NAME
from collective_matmul.ops.attention.attend import (
    ATTENTION_CHECKPOINT_NAME,
    dot_product_attention,
    explain_attention,
)
from collective_matmul.ops.attention.choice import AttentionDecision
from collective_matmul.ops.attention.context.api import context_attention
from collective_matmul.ops.attention.context.layout import zigzag_order
from collective_matmul.ops.attention.context.measured_program import ContextRepetitions as _Context  # noqa: F401
from collective_matmul.ops.attention.segments import Segments, segments_of_ids, segments_of_lengths
from collective_matmul.ops.experts.api import expert_mlp
from collective_matmul.ops.experts.gradients import HIDDEN_CHECKPOINT_NAME
from collective_matmul.ops.experts.grouped.measured_program import GroupedRepetitions as _Grouped  # noqa: F401
from collective_matmul.ops.experts.measured_program import ExpertRepetitions as _Experts  # noqa: F401
from collective_matmul.ops.experts.prequantize_experts import prequantize_experts
from collective_matmul.ops.matmul.api import (
    CHECKPOINT_NAME,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from collective_matmul.ops.matmul.einsum import collective_einsum
from collective_matmul.ops.matmul.measured_program import Stack as _Stack  # noqa: F401  # Registers the ops.
from collective_matmul.ops.matmul.prequantize import prequantize, prescale, quantize_frozen
from collective_matmul.rewrite import overlap
from collective_matmul.source_location import warn_deprecated
from collective_matmul.tuning.tune import tune

__all__ = [
    "ATTENTION_CHECKPOINT_NAME",
    "CHECKPOINT_NAME",
    "HIDDEN_CHECKPOINT_NAME",
    "OVERLAP_OPTIONS",
    "SCALE_CHECKPOINT_NAME",
    "AttentionDecision",
    "Quantized",
    "Segments",
    "UnknownBackendError",
    "UnsupportedSiteError",
    "all_gather_matmul",
    "collective_einsum",
    "context_attention",
    "dot_product_attention",
    "expert_mlp",
    "explain",
    "explain_attention",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "overlap",
    "overlap_jit",
    "prequantize",
    "prequantize_experts",
    "prescale",
    "quantize_frozen",
    "record_decisions",
    "segments_of_ids",
    "segments_of_lengths",
    "tune",
    "zigzag_order",
]


def __getattr__(name: str) -> type:
    """Names of earlier releases."""
    if name == "QuantizedWeight":
        warn_deprecated("QuantizedWeight is now called Quantized; the old name will be removed")
        return Quantized
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
