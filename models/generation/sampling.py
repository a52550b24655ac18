"""The choice of the next token from logits that are sharded over the vocabulary.

Legend of local shapes: B is batch, V the vocabulary, D the size of the tensor axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.random_keys import check_seed, random_key

_LEAST, _MOST = (float(value) for value in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: divides the logits before a token is drawn; 0, or what float32 cannot divide by,
        takes the likeliest token.
      top_k: number of likeliest tokens that are drawn from; 0: all.
      top_p: the fewest likeliest tokens whose probabilities add up to it are drawn from; 1: all.
      seed: random seed, from 0 to 2**64 - 1. A sequence's tokens depend on it and on the sequence's
        number, not on the mesh or on other sequences.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            (
                "top_k",
                isinstance(self.top_k, Integral) and self.top_k >= 0,
                "a whole number of at least 1, or 0 for all tokens",
            ),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)}: expected {expected}")
        check_seed(self.seed)


def choose(
    logits: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    *,
    vocabulary_size: int,
    axis_name: str,
) -> jax.Array:
    """The next token of each sequence.

    Args:
      logits: [B, V/D], this device's columns, with the smallest number in those of padding.
      positions: int32 [B], the places that the tokens get.
      sampling: how they are chosen.
      vocabulary_size: number of tokens, at most V.
      axis_name: the tensor axis.

    Returns:
      int32 [B], the same on every device.
    """
    # Of a smaller temperature, float32 holds fewer digits or none.
    if sampling.temperature < _LEAST:
        return _likeliest(logits, axis_name)
    logits = lax.all_gather(logits, axis_name, axis=1, tiled=True, to="invarying")
    logits = logits[:, :vocabulary_size].astype(jnp.float32)
    # The largest is 0, which no temperature makes infinite.
    logits -= jnp.max(logits, axis=1, keepdims=True)
    logits /= min(sampling.temperature, _MOST)
    if sampling.top_k or sampling.top_p < 1:
        logits = jnp.where(logits >= _threshold(logits, sampling), logits, -jnp.inf)
    numbers = jnp.arange(len(logits))

    @jax.vmap
    def draw(logits: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(random_key(sampling.seed), number)
        return jax.random.categorical(jax.random.fold_in(key, position), logits)

    return draw(logits, numbers, positions).astype(jnp.int32)


def _likeliest(logits: jax.Array, axis_name: str) -> jax.Array:
    """The first of the largest logits."""
    columns = logits.shape[1]
    own = jnp.argmax(logits, axis=1).astype(jnp.int32)
    largest = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
    tokens = own + lax.axis_index(axis_name) * columns
    largest, tokens = (
        lax.all_gather(x, axis_name, to="invarying") for x in (largest.astype(jnp.float32), tokens)
    )
    return jnp.take_along_axis(tokens, jnp.argmax(largest, axis=0)[None], axis=0)[0]


def _threshold(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The smallest logit that is drawn: float32 [B, V] -> [B, 1]."""
    ordered = -jnp.sort(-logits, axis=1)
    if sampling.top_k:
        ordered = ordered[:, : min(sampling.top_k, ordered.shape[1])]
    if sampling.top_p == 1:
        return ordered[:, -1:]
    # Of what is left of the first k, as the two are applied one after the other.
    probabilities = jax.nn.softmax(ordered)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    # Nothing precedes the likeliest, which a top_p that float32 rounds to 0 keeps too.
    last = jnp.maximum(jnp.sum(before < sampling.top_p, axis=1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(ordered, last, axis=1)
