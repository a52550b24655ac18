"""Rotary position embedding: Su et al., "RoFormer", 2021; scaled as in Llama 3.1 or by YaRN."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LlamaConfig, RotaryScaling


def frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position for each pair of features: float32 [head_dim / 2]."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    radians, scaling = config.rotary_base**-exponents, config.rotary_scaling
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(scaling, config)
    else:
        kept = _kept_by_llama(scaling, radians)
    return (kept * radians + (1 - kept) * radians / scaling.factor).astype(np.float32)


def _kept_by_llama(scaling: RotaryScaling, radians: np.ndarray) -> np.ndarray:
    """The share of each frequency that is not scaled: 0 for waves longer than the original context,
    1 for short ones, and a blend in between."""
    turns = scaling.original_context * radians / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _kept_by_yarn(scaling: RotaryScaling, config: LlamaConfig) -> np.ndarray:
    """The share of each frequency that is not scaled: a ramp over pairs of features."""

    def pair(turns: float) -> float:
        """The pair, in fractions, whose wave turns so often in the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rotary_base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(config.head_dim // 2) - first) / (last - first), 0, 1)


def attention_factor(config: LlamaConfig) -> float:
    """The factor of rotated queries and keys: 1 unless YaRN scales them."""
    scaling = config.rotary_scaling
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is None:
        return 0.1 * math.log(scaling.factor) + 1
    return scaling.attention_factor


def rotate(
    x: jax.Array,
    frequencies: np.ndarray,
    positions: jax.Array | None = None,
    *,
    factor: float = 1.0,
) -> jax.Array:
    """Rotates each pair of features by position × frequency.

    Feature i is paired with feature i + head_dim / 2, as in Hugging Face's weights. Computes in
    float32.

    Args:
      x: [batch, sequence, heads, head_dim], the whole sequence.
      frequencies: radians per position, float32 [head_dim / 2].
      positions: int32 [batch, sequence]; None counts from 0 to the end of the sequence.
      factor: `attention_factor`, which multiplies the result.

    Returns:
      The rotated features, in the shape and dtype of x.
    """
    if positions is None:
        positions = jnp.arange(x.shape[1])[None]
    return _rotate(x, jnp.asarray(frequencies), positions, factor)


# The backward computes sines again: they are functions of positions alone, and large once they are
# broadcast.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3,))
def _rotate(x: jax.Array, frequencies: jax.Array, positions: jax.Array, factor: float) -> jax.Array:
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    cos, sin = (wave(angles)[:, :, None, :] for wave in (jnp.cos, jnp.sin))
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(wave, first.shape) for wave in (cos, sin))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
