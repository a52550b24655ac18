"""Flax layers that communicate by collective matmuls, and a wrapper for existing models.

Inputs are global arrays under `jax.jit`, or local shards inside a `shard_map`; `sharding_context`
tells which. Outputs are sharded as the layer's documentation says.

- linear/: column- and row-parallel layers. experts/: routers and experts.
- parallelize/: wraps the layers that a model already has.
- prequantized: kernels that are quantized once. Three files are shared: sharding_context,
  layer_checks and sequence_form.
"""

from collective_matmul.layers.experts.experts import ExpertMLP
from collective_matmul.layers.experts.router import BalancingBias, Router
from collective_matmul.layers.experts.router_statistics import (
    RouterStatistics,
    largest_over_mean,
    load_balancing_loss,
    router_z_loss,
    updated_bias,
)
from collective_matmul.layers.linear.blocks import AttentionProjection, GatedFeedForward
from collective_matmul.layers.linear.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    shared_gather,
)
from collective_matmul.layers.linear.lora import Lora
from collective_matmul.layers.parallelize.parallel_linen import ParallelModule
from collective_matmul.layers.parallelize.parallel_styles import Column, Heads, Row, Shared
from collective_matmul.layers.parallelize.parallelize import parallelize
from collective_matmul.layers.prequantized import prequantize_kernels

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
