"""Flax layers that communicate by collective matmuls, and a wrapper for existing models."""

from collective_matmul.layers.blocks import AttentionProjection, GatedFeedForward
from collective_matmul.layers.linear import ColumnParallelLinear, RowParallelLinear, shared_gather
from collective_matmul.layers.parallel_linen import ParallelModule
from collective_matmul.layers.parallel_styles import Column, Heads, Row
from collective_matmul.layers.parallelize import parallelize
from collective_matmul.layers.prequantized import prequantize_kernels

__all__ = [
    "AttentionProjection",
    "Column",
    "ColumnParallelLinear",
    "GatedFeedForward",
    "Heads",
    "ParallelModule",
    "Row",
    "RowParallelLinear",
    "parallelize",
    "prequantize_kernels",
    "shared_gather",
]
