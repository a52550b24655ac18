"""Rotary position embedding: Su et al., "RoFormer", 2021; scaled as in Llama 3.1."""

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
    return _scale(config.rotary_base**-exponents, config.rotary_scaling).astype(np.float32)


def _scale(radians: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Slows down waves longer than the original context, keeps short ones, and blends in
    between."""
    turns = scaling.original_context * radians / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * radians + (1 - kept) * radians / scaling.factor


def rotate(x: jax.Array, frequencies: np.ndarray, positions: jax.Array | None = None) -> jax.Array:
    """Rotates each pair of features by position × frequency.

    Feature i is paired with feature i + head_dim / 2, as in Hugging Face's weights. Computes in
    float32.

    Args:
      x: [batch, sequence, heads, head_dim], the whole sequence.
      frequencies: radians per position, float32 [head_dim / 2].
      positions: int32 [batch, sequence]; None counts from 0 to the end of the sequence.

    Returns:
      The rotated features, in the shape and dtype of x.
    """
    if positions is None:
        positions = jnp.arange(x.shape[1])[None]
    return _rotate(x, jnp.asarray(frequencies), positions)


# The backward computes sines again: they are functions of positions alone, and large once they are
# broadcast.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _rotate(x: jax.Array, frequencies: jax.Array, positions: jax.Array) -> jax.Array:
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    cos, sin = (wave(angles)[:, :, None, :] for wave in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(wave, first.shape) for wave in (cos, sin))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
