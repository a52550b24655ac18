"""Flax layers that communicate by collective matmuls, and a wrapper for existing models."""

from collective_matmul.layers.blocks import AttentionProjection, GatedFeedForward
from collective_matmul.layers.experts import ExpertMLP
from collective_matmul.layers.linear import ColumnParallelLinear, RowParallelLinear, shared_gather
from collective_matmul.layers.lora import Lora
from collective_matmul.layers.parallel_linen import ParallelModule
from collective_matmul.layers.parallel_styles import Column, Heads, Row, Shared
from collective_matmul.layers.parallelize import parallelize
from collective_matmul.layers.prequantized import prequantize_kernels
from collective_matmul.layers.router import BalancingBias, Router
from collective_matmul.layers.router_statistics import (
    RouterStatistics,
    largest_over_mean,
    load_balancing_loss,
    router_z_loss,
    updated_bias,
)

__all__ = [
    "AttentionProjection",
    "BalancingBias",
    "Column",
    "ColumnParallelLinear",
    "ExpertMLP",
    "GatedFeedForward",
    "Heads",
    "Lora",
    "ParallelModule",
    "Router",
    "RouterStatistics",
    "Row",
    "RowParallelLinear",
    "Shared",
    "largest_over_mean",
    "load_balancing_loss",
    "parallelize",
    "prequantize_kernels",
    "router_z_loss",
    "shared_gather",
    "updated_bias",
]
