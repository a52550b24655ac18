"""Routers: which experts a token goes to, and with which weights.

Legend: T tokens, h features, E experts, k choices of a token.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.layers import layer_checks
from collective_matmul.layers.experts.router_statistics import RouterStatistics
from collective_matmul.ops.matmul.api import CHECKPOINT_NAME

Score = Literal["softmax", "sigmoid"]

#: Added to the sum of scores before they are divided by it: that of sigmoids may be 0.
_SMALLEST_SUM = 1e-20
_KERNEL_INIT = nnx.initializers.lecun_normal()


class RouterOptions(TypedDict, total=False):
    """Options that `ExpertMLP` passes on: see `Router`."""

    score: Score
    normalize_weights: bool
    weight_scale: float
    selection_bias: bool
    logit_bias: bool
    groups: int
    chosen_groups: int


class BalancingBias(nnx.Variable[jax.Array]):
    """Float32 [E]: a router adds it to scores when it chooses, and only then.

    It is not a parameter: it has no gradient, and ``nnx.Param`` does not select it. After a step, a
    training loop replaces it by `updated_bias`::

        router.bias[...] = updated_bias(router.bias[...], statistics.tokens_per_expert, 0.001)
    """


class RouterParameters(NamedTuple):
    """The arrays of a router, or their specs; see `Router`."""

    kernel: Any
    bias: Any = None
    logit_bias: Any = None


class RouterDecision(NamedTuple):
    """The decisions of a router.

    Attributes:
      expert_ids: int32 [T, k], best first.
      expert_weights: float32 [T, k].
      statistics: sums over these tokens.
    """

    expert_ids: jax.Array
    expert_weights: jax.Array
    statistics: RouterStatistics


class Router(nnx.Module):
    """Chooses k of E experts for each token, by a score of logits ``x @ kernel``, in float32.

    Of experts with equal scores the first is chosen. Known models::

        Mixtral       the defaults: equal to a softmax over the logits of the chosen
        Qwen3-MoE     normalize_weights=norm_topk_prob
        gpt-oss       logit_bias=True
        DeepSeek-V3   score="sigmoid", selection_bias=True, weight_scale=routed_scaling_factor,
                      groups=n_group, chosen_groups=topk_group

    The parameters, which are the same on all devices::

        kernel  [h, E]    P(None, None)
        bias    [E]       P(None), if there is a selection bias; see `BalancingBias`
        logit_bias  [E]   P(None), if logits have a bias, which has gradients

    Args:
      in_features: h.
      experts: E.
      choices: k.
      score: "softmax", over all experts, or "sigmoid".
      normalize_weights: whether the scores of the chosen experts are divided by their sum.
      weight_scale: what weights are multiplied with, last.
      selection_bias: whether a bias that balances without a loss is added to scores for the choice.
      logit_bias: whether a bias, at first 0, is added to logits.
      groups: the number of groups of experts, in order; it divides E.
      chosen_groups: a token's experts are from so many groups, those with the highest sums of their
        two best scores: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
      param_dtype: dtype of the kernel.
      kernel_init: initializer, called with the shape [h, E].
      rngs: random keys.

    Raises:
      ValueError: for options that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        experts: int,
        choices: int,
        *,
        score: Score = "softmax",
        normalize_weights: bool = True,
        weight_scale: float = 1.0,
        selection_bias: bool = False,
        logit_bias: bool = False,
        groups: int = 1,
        chosen_groups: int = 1,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        rngs: nnx.Rngs,
    ):
        layer_checks.router(experts, choices, score, get_args(Score), groups, chosen_groups)
        self.in_features, self.experts, self.choices = in_features, experts, choices
        self.score: Score = score
        self.normalize_weights, self.weight_scale = normalize_weights, weight_scale
        self.groups, self.chosen_groups = groups, chosen_groups
        kernel = kernel_init(rngs.params(), (in_features, experts), param_dtype)
        self.kernel = nnx.Param(kernel, out_sharding=(None, None), eager_sharding=False)
        if selection_bias:
            zeros = jnp.zeros(experts, jnp.float32)
            self.bias = BalancingBias(zeros, out_sharding=(None,), eager_sharding=False)
        else:
            self.bias = nnx.data(None)
        self.logit_bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if logit_bias:
            zeros = jnp.zeros(experts, param_dtype)
            self.logit_bias = nnx.Param(zeros, out_sharding=(None,), eager_sharding=False)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> RouterDecision:
        """Routes tokens x [T, h].

        Args:
          x: the tokens.
          mask: [T], 0 or False for tokens that statistics leave out, such as padding; or None.
        """
        return self.route(x, mask, *self.parameters)

    @property
    def parameters(self) -> RouterParameters:
        """The arrays that it routes by."""
        bias, logit_bias = (
            None if variable is None else variable[...] for variable in (self.bias, self.logit_bias)
        )
        return RouterParameters(self.kernel[...], bias, logit_bias)

    @jax.named_scope("router")
    def route(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        kernel: jax.Array,
        bias: jax.Array | None,
        logit_bias: jax.Array | None = None,
    ) -> RouterDecision:
        """Routes tokens as the module with these parameters."""
        # The highest precision: GPUs would otherwise multiply float32 in 10 bits.
        logits = jnp.matmul(
            x.astype(jnp.float32), kernel.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        if logit_bias is not None:
            logits += logit_bias.astype(jnp.float32)[None]
        if self.score == "softmax":
            scores = probabilities = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / (scores.sum(-1, keepdims=True) + _SMALLEST_SUM)
        ids = self._choose(scores, bias)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.normalize_weights:
            weights /= weights.sum(-1, keepdims=True) + _SMALLEST_SUM
        statistics = _statistics(logits, probabilities, ids, mask)
        return RouterDecision(ids, weights * jnp.float32(self.weight_scale), statistics)

    def _choose(self, scores: jax.Array, bias: jax.Array | None) -> jax.Array:
        """The numbers [T, k] of the experts with the highest scores [T, E]."""
        scores = lax.stop_gradient(scores)
        if bias is not None:
            scores += lax.stop_gradient(bias)[None]
        if self.chosen_groups < self.groups:
            grouped = scores.reshape(scores.shape[0], self.groups, -1)
            best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            _, chosen = lax.top_k(best, self.chosen_groups)
            is_chosen = jax.nn.one_hot(chosen, self.groups, dtype=bool).any(1)
            scores = jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)
        _, ids = lax.top_k(scores, self.choices)
        # Policies that keep the results of matmuls keep it too. Chosen again from logits that were
        # rounded otherwise, experts in the backward could differ from those of the forward.
        return checkpoint_name(ids, CHECKPOINT_NAME)


def _statistics(
    logits: jax.Array, probabilities: jax.Array, ids: jax.Array, mask: jax.Array | None
) -> RouterStatistics:
    """The sums over tokens [T, ...] that are not masked."""
    counted = jnp.ones(len(ids), jnp.float32) if mask is None else mask.astype(jnp.float32)
    counted = vary_over(counted, varying_axes(logits))
    chosen = jax.nn.one_hot(ids, logits.shape[-1], dtype=jnp.float32)
    z = jax.nn.logsumexp(logits, axis=-1)
    return RouterStatistics(
        tokens_per_expert=jnp.sum(chosen * counted[:, None, None], (0, 1)),
        probability_per_expert=jnp.sum(probabilities * counted[:, None], 0),
        z_square_sum=jnp.sum(z * z * counted),
        tokens=jnp.sum(counted),
    )
