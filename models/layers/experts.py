"""The experts of a block, and the statistics of the routers of all blocks.

A model's blocks pass the statistics on with the residual stream: each puts its own behind those of
the blocks before it. So loops over blocks need not know that there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collective_matmul.layers import ExpertMLP, RouterStatistics
from models.config import LlamaConfig
from models.parameters.use import as_varying


@dataclass(frozen=True)
class ExpertPlacement:
    """Which mesh axes divide the experts of a model, and how they exchange tokens.

    Attributes:
      axis_name: the axis that experts are divided over, or several, or ().
      hidden_axis_name: the axis that divides the hidden features of experts, or None.
      implementation: as `collective_matmul.expert_mlp` takes it.
      recompute_hidden: likewise.
    """

    axis_name: str | tuple[str, ...]
    hidden_axis_name: str | None = None
    implementation: str | tuple[str, ...] | None = None
    recompute_hidden: bool = False

    @classmethod
    def of(
        cls,
        axis_name: str | Sequence[str],
        hidden_axis_name: str | None,
        implementation: str | Sequence[str] | None,
        recompute_hidden: bool = False,
    ) -> ExpertPlacement:
        """The placement, hashable whatever sequences there are."""
        names = axis_name if isinstance(axis_name, str) else tuple(axis_name)
        if not isinstance(implementation, str | None):
            implementation = tuple(implementation)
        return cls(names, hidden_axis_name, implementation, recompute_hidden)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """All axes that divide experts."""
        names = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        return (*names, self.hidden_axis_name)


def make_experts(
    config: LlamaConfig,
    placement: ExpertPlacement,
    *,
    dtype: jax.typing.DTypeLike,
    kernel_init: Any,
    rngs: Any,
    weight_axis_name: str | None = None,
    fp8: str | None = None,
    **others: Any,
) -> ExpertMLP:
    """The router and the experts of one block.

    Args:
      config: shape of the model.
      placement: the axes.
      dtype: dtype of the experts' computation.
      kernel_init: initializer of all matrices.
      rngs: random keys.
      weight_axis_name: a further axis that shards weights, unless it divides experts already.
      fp8: the recipe by which experts quantize their operands, or None.
      **others: options of linear layers that experts do not have.
    """
    del others
    assert config.num_experts is not None and config.num_experts_per_token is not None
    return ExpertMLP(
        config.features,
        config.hidden_features,
        config.num_experts,
        config.num_experts_per_token,
        normalize_weights=config.normalize_expert_weights,
        activation=config.expert_activation,
        use_bias=config.expert_bias,
        logit_bias=config.expert_bias,
        axis_name=placement.axis_name,
        hidden_axis_name=placement.hidden_axis_name,
        weight_axis_name=None if weight_axis_name in placement.axes else weight_axis_name,
        implementation=placement.implementation,
        recompute_hidden=placement.recompute_hidden,
        fp8=fp8,
        dtype=dtype,
        kernel_init=kernel_init,
        rngs=rngs,
    )


def no_statistics(config: LlamaConfig, like: jax.Array) -> RouterStatistics | None:
    """The statistics before the first block: zeros for all blocks, [layers, *].

    Args:
      config: shape of the model.
      like: an array that varies over the same mesh axes as what routers read.

    Returns:
      None for a model without experts.
    """
    if config.num_experts is None:
        return None
    each = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
    zeros = RouterStatistics(each, each, each[:, 0], each[:, 0])
    axes = jax.typeof(like).manual_axis_type.varying
    return jax.tree.map(lambda leaf: as_varying(leaf, axes), zeros)


def with_statistics_of(
    seen: RouterStatistics | None, own: RouterStatistics | None
) -> RouterStatistics | None:
    """The statistics of all blocks so far, [layers, *], with those of one more as the last."""
    if own is None:
        return seen
    return jax.tree.map(lambda all_, one: jnp.concatenate([all_[1:], one[None]]), seen, own)
