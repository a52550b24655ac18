"""A dense mixture of experts: every expert computes every token. And what its losses are.

Legend: N tokens, h features, E experts, k choices, f hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def dense_router(
    kernel: Any,
    x: Any,
    choices: int,
    *,
    score: str = "softmax",
    bias: Any = None,
    logit_bias: Any = 0,
) -> tuple[Any, Any, Any, Any]:
    """The logits, the probabilities, the choices and the weights, [N, E] each, of tokens [N, h].

    Of equal scores the first is chosen. Weights are 0 where an expert is not chosen.
    """
    logits = jnp.matmul(x, kernel, precision="highest") + jnp.reshape(logit_bias, (1, -1))
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    biased = scores if bias is None else scores + bias.reshape(1, -1)
    # The number of experts that go first.
    better = biased[:, None] > biased[:, :, None]
    experts = jnp.arange(logits.shape[-1])
    first = (biased[:, None] == biased[:, :, None]) & (experts[None, :] < experts[:, None])[None]
    is_chosen = jnp.sum(better | first, -1) < choices
    weights = jnp.where(is_chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    return logits, scores / scores.sum(-1, keepdims=True), is_chosen, weights


def dense_experts(parameters: Any, x: Any, weights: Any) -> Any:
    """The weighted sum of all experts: [N, h] and [N, E] -> [N, h]."""
    gate = jnp.einsum("nh,ehf->nef", x, parameters["w_gate"])
    up = jnp.einsum("nh,ehf->nef", x, parameters["w_up"])
    if "b_gate" not in parameters:
        hidden = jax.nn.silu(gate) * up
        return jnp.einsum("nef,efh,ne->nh", hidden, parameters["w_down"], weights)
    # Experts of gpt-oss.
    gate = jnp.minimum(gate + parameters["b_gate"][None], 7)
    up = jnp.clip(up + parameters["b_up"][None], -7, 7)
    hidden = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    each = jnp.einsum("nef,efh->neh", hidden, parameters["w_down"]) + parameters["b_down"][None]
    return jnp.einsum("neh,ne->nh", each, weights)


def dense_losses(routed: Sequence[Any], mask: Any) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss and the z loss of tokens of which `mask` [N] counts some.

    Args:
      routed: what `dense_router` returns.
      mask: [N].
    """
    logits, probabilities, is_chosen = routed[:3]
    mask = jnp.asarray(mask, jnp.float32).reshape(-1, 1)
    tokens = jnp.sum(mask)
    fractions = jnp.sum(is_chosen.astype(jnp.float32) * mask, 0) / tokens
    means = jnp.sum(probabilities * mask, 0) / tokens
    z = jnp.sum(jax.nn.logsumexp(logits, -1, keepdims=True) ** 2 * mask) / tokens
    return logits.shape[-1] * jnp.sum(fractions * means), z
