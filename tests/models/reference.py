"""An independent Llama, and its families: one device, float32, no parallelism.

It takes the trainer's flat parameters, {"layers.0.attention.output.kernel": ...}.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LlamaConfig, RotaryScaling

Array = jax.Array | np.ndarray


def logits(config: LlamaConfig, params: Mapping[str, Array], tokens: Array) -> Array:
    """int32 tokens [B, S] -> logits [B, S, vocabulary_size]."""
    return logits_and_router_logits(config, params, tokens)[0]


def logits_and_router_logits(
    config: LlamaConfig, params: Mapping[str, Array], tokens: Array
) -> tuple[Array, list[Array]]:
    """The logits, and the logits [B, S, experts] of each layer's router, if there are any."""
    x, of_routers = params["embedding"][tokens], []
    for layer in range(config.num_layers):
        local = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in params.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = _norm(config, x, local["attention_norm.scale"])
        x = x + _attention(config, local, normed, layer)
        normed = _norm(config, x, local["feed_forward_norm.scale"])
        if config.num_experts is None:
            x = x + _feed_forward(local, normed)
        else:
            of_routers.append(normed @ local["experts.router.kernel"])
            if config.expert_bias:
                of_routers[-1] += local["experts.router.logit_bias"][None, None]
            x = x + _experts(config, local, normed, of_routers[-1])
    x = _norm(config, x, params["norm.scale"])
    head = params["embedding"].T if config.tied_head else params["head.kernel"]
    return jnp.einsum("bsf,fv->bsv", x, head)[..., : config.vocabulary_size], of_routers


def loss(config: LlamaConfig, params: Mapping[str, Array], tokens: Array, targets: Array) -> Array:
    """Cross-entropy in nats per token, [B, S]."""
    log_probabilities = jax.nn.log_softmax(logits(config, params, tokens), axis=-1)
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


def _norm(config: LlamaConfig, x: Array, scale: Array) -> Array:
    root = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon)
    return x / root * scale[None, None]


def _feed_forward(params: Mapping[str, Array], x: Array) -> Array:
    gate, up, down = (params[f"feed_forward.{name}.kernel"] for name in ("gate", "up", "down"))
    gated = x @ gate
    return (gated * jax.nn.sigmoid(gated) * (x @ up)) @ down


def _experts(config: LlamaConfig, params: Mapping[str, Array], x: Array, logits: Array) -> Array:
    """All experts of all tokens, of which the chosen have a weight."""
    scores = jax.nn.softmax(logits)
    ranks = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
    weights = jnp.where(ranks < (config.num_experts_per_token or 0), scores, 0)
    if config.normalize_expert_weights:
        weights /= weights.sum(-1, keepdims=True)
    gate, up, down = (params[f"experts.w_{name}"] for name in ("gate", "up", "down"))
    gated, up = (jnp.einsum("bsf,efh->bseh", x, w) for w in (gate, up))
    if config.expert_bias:
        gated += params["experts.b_gate"][None, None]
        up += params["experts.b_up"][None, None]
    if config.expert_activation == "gpt_oss":
        gated, up = jnp.minimum(gated, 7), jnp.clip(up, -7, 7)
        hidden = gated / (1 + jnp.exp(-1.702 * gated)) * (up + 1)
    else:
        hidden = gated * jax.nn.sigmoid(gated) * up
    each = jnp.einsum("bseh,ehf->bsef", hidden, down)
    if config.expert_bias:
        each += params["experts.b_down"][None, None]
    return jnp.einsum("bsef,bse->bsf", each, weights)


def router_losses(config: LlamaConfig, of_routers: list[Array]) -> tuple[Array, Array]:
    """The loss that balances experts and the one of large logits, of all layers' routers."""
    logits = jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in of_routers])
    scores = jax.nn.softmax(logits)
    ranks = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
    chosen = jnp.mean(ranks < (config.num_experts_per_token or 0), 0)
    balance = logits.shape[-1] * jnp.sum(chosen * jnp.mean(scores, 0))
    return balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


def _attention(config: LlamaConfig, params: Mapping[str, Array], x: Array, layer: int) -> Array:
    query, key, value = (
        jnp.einsum("bsf,fhd->bshd", x, params[f"attention.projection.{name}.kernel"])
        for name in ("query", "key", "value")
    )
    if config.projection_bias:
        query, key, value = (
            heads + params[f"attention.projection.{name}.bias"][None, None]
            for name, heads in (("query", query), ("key", key), ("value", value))
        )
    if config.query_key_norm:
        query, key = (
            _norm(config, heads, params[f"attention.{name}_norm.scale"][None])
            for name, heads in (("query", query), ("key", key))
        )
    query, key = _rotate(config, query), _rotate(config, key)
    repeats = config.num_heads // config.num_key_value_heads
    key, value = (jnp.repeat(heads, repeats, axis=2) for heads in (key, value))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / np.sqrt(config.head_dim)
    causal = np.tril(np.ones(scores.shape[-2:], bool))
    period = config.full_attention_period
    if config.sliding_window is not None and not (period and layer % period == period - 1):
        causal = np.triu(causal, 1 - config.sliding_window)
    scores = jnp.where(causal[None, None], scores, -jnp.inf)
    if config.attention_sinks:  # A key more, whose value is zero.
        sinks = params["attention.sinks"].reshape(1, -1, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
        value = jnp.pad(value, ((0, 0), (0, 1), (0, 0), (0, 0)))
    attended = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), value)
    output = jnp.einsum("bshd,hdf->bsf", attended, params["attention.output.kernel"])
    return output + params["attention.output.bias"][None, None] if config.output_bias else output


def _rotate(config: LlamaConfig, x: Array) -> Array:
    """Rotates feature i with feature i + head_dim / 2 as a complex number."""
    half = config.head_dim // 2
    frequency = np.array([wave(config, i) for i in range(half)])
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * frequency[None, :])[None, :, None, :]
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * turn.astype(np.complex64)
    return jnp.concatenate([turned.real, turned.imag], axis=-1) * _length(config)


def _length(config: LlamaConfig) -> float:
    """Factor that YaRN multiplies queries and keys by, section 3.4 of its paper."""
    scaling = config.rotary_scaling
    if scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * float(np.log(scaling.factor)) + 1


def wave(config: LlamaConfig, i: int) -> float:
    """Radians per position of pair i, by the branches of Llama 3.1's paper, or by YaRN's."""
    frequency = config.rotary_base ** (-2 * i / config.head_dim)
    scaling = config.rotary_scaling
    if scaling.kind == "yarn":
        return _yarn_wave(config, scaling, i, frequency)
    wavelength = 2 * np.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn_wave(config: LlamaConfig, scaling: RotaryScaling, i: int, frequency: float) -> float:
    """Pairs between those whose waves turn beta_fast and beta_slow times are on a ramp."""
    ends = []
    for beta, rounded in ((scaling.beta_fast, np.floor), (scaling.beta_slow, np.ceil)):
        # base^(-2 i / head_dim) × original context = 2 pi beta, solved for i.
        radians = 2 * np.pi * beta / scaling.original_context
        pair = -np.log(radians) / np.log(config.rotary_base) * config.head_dim / 2
        ends.append(rounded(pair) if scaling.truncate else pair)
    first, last = max(ends[0], 0), min(ends[1], config.head_dim - 1)
    if i <= first:
        return frequency
    ramp = np.clip((i - first) / (last - first), 0, 1)
    return ramp * frequency / scaling.factor + (1 - ramp) * frequency
