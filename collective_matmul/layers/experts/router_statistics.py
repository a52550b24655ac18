"""Statistics of routers, and the losses of a global batch that follow from them.

Every statistic is a sum over tokens. Sums over devices, microbatches and layers are statistics too.
So losses of the global batch are exact, although the product of two means is not the mean of
products. Legend: E is the number of experts; * are dimensions such as layers, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import psum, tracks_varying_axes, varying_axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Sums over tokens of a router's decisions, in float32. Masked tokens are left out.

    ``a + b`` are the statistics of both.

    Attributes:
      tokens_per_expert: [*, E], how often each expert was chosen. It has no gradient.
      probability_per_expert: [*, E], sums of the router's probabilities of each expert.
      z_square_sum: [*], the sum of squares of the log of the sum of exponentials of the logits.
      tokens: [*], the number of tokens. Counts are exact up to 2**24.
    """

    tokens_per_expert: jax.Array
    probability_per_expert: jax.Array
    z_square_sum: jax.Array
    tokens: jax.Array

    def __add__(self, other: RouterStatistics) -> RouterStatistics:
        """The statistics of the tokens of both."""
        return jax.tree.map(jnp.add, self, other)

    def sum_over_devices(self, axis_name: str | Sequence[str]) -> RouterStatistics:
        """The statistics of the tokens of all devices; for use inside `jax.shard_map`.

        Args:
          axis_name: the mesh axes whose devices have different tokens. Under ``check_vma=True``,
            axes over which the statistics do not vary are left out.
        """
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)

        def total(value: jax.Array) -> jax.Array:
            for name in names:
                if not tracks_varying_axes(name) or name in varying_axes(value):
                    value = psum(value, name)
            return value

        return jax.tree.map(total, self)

    def sum_over_layers(self) -> RouterStatistics:
        """The sums over the first dimension, which a scan over layers adds."""
        return jax.tree.map(lambda value: value.sum(0), self)


def load_balancing_loss(
    statistics: RouterStatistics, whole: RouterStatistics | None = None
) -> jax.Array:
    """E times the sum over experts of the fraction of choices times the mean probability.

    It is the number of choices, k, if all experts have equally many tokens. Fedus et al., "Switch
    Transformers", 2021, section 2.2, equation 4. Statistics summed over all layers give what
    Hugging Face's `load_balancing_loss_func` returns for their concatenated logits.

    Args:
      statistics: the statistics of a batch, with any dimensions in front.
      whole: the statistics of a larger batch, of which `statistics` are those of a part: a device's
        tokens, or a microbatch. The result is the part's share: the shares of all parts add up to
        the loss of the larger batch, and so do their gradients. None: `statistics` are of all.

    Returns:
      Float32 [*], the loss. Only `probability_per_expert` of `statistics` has a gradient.
    """
    whole = statistics if whole is None else whole
    tokens = lax.stop_gradient(_at_least_one(whole.tokens))
    fractions = lax.stop_gradient(whole.tokens_per_expert) / tokens[..., None]
    probabilities = statistics.probability_per_expert / tokens[..., None]
    return statistics.tokens_per_expert.shape[-1] * jnp.sum(fractions * probabilities, -1)


def router_z_loss(statistics: RouterStatistics, whole: RouterStatistics | None = None) -> jax.Array:
    """The mean over tokens of ``logsumexp(logits)**2``, which keeps logits small.

    Zoph et al., "ST-MoE", 2022, equation 5.

    Args:
      statistics: as for `load_balancing_loss`.
      whole: likewise.

    Returns:
      Float32 [*].
    """
    whole = statistics if whole is None else whole
    return statistics.z_square_sum / lax.stop_gradient(_at_least_one(whole.tokens))


def largest_over_mean(statistics: RouterStatistics) -> jax.Array:
    """The largest number of tokens of an expert over their mean: 1 for balanced experts.

    Returns:
      Float32 [*]; 1 if there are no tokens.
    """
    counts = statistics.tokens_per_expert
    mean = counts.mean(-1)
    return jnp.where(mean > 0, counts.max(-1) / jnp.where(mean > 0, mean, 1), 1)


def updated_bias(bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """The bias of a router after a step: higher for experts with fewer tokens than the mean.

    Call it after the optimizer, with the statistics of the global batch; see `BalancingBias`. Wang
    et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.

    Args:
      bias: [*, E].
      tokens_per_expert: [*, E], of the global batch, all microbatches together.
      rate: the step of the bias; 0.001 for DeepSeek-V3.

    Returns:
      [*, E], in the bias's dtype.
    """
    counts = lax.stop_gradient(tokens_per_expert).astype(jnp.float32)
    errors = counts.mean(-1, keepdims=True) - counts
    return bias + (rate * jnp.sign(errors)).astype(bias.dtype)


def _at_least_one(tokens: jax.Array) -> jax.Array:
    """The number of tokens; 1 if all are masked, so that losses are 0."""
    return jnp.maximum(tokens, 1)
