"""The keys and values of the tokens so far, and attention of one more token to them.

Legend of local shapes: B is batch, C the capacity of the cache in tokens, N query heads, K key and
value heads of this device, H head size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LayerCache(NamedTuple):
    """The cache of one layer. Heads are before tokens, as the matmuls of attention batch them."""

    key: jax.Array
    """[B, K, C, H]."""
    value: jax.Array
    """[B, K, C, H]."""


def filled(key: jax.Array, value: jax.Array, capacity: int) -> LayerCache:
    """The cache of the first S tokens: [B, S, K, H] -> [B, K, C, H], with zeros after them."""

    def place(heads: jax.Array) -> jax.Array:
        heads = jnp.swapaxes(heads, 1, 2)
        missing = capacity - heads.shape[2]
        return jnp.pad(heads, ((0, 0), (0, 0), (0, missing), (0, 0)))

    return LayerCache(place(key), place(value))


def appended(
    cache: LayerCache, key: jax.Array, value: jax.Array, positions: jax.Array
) -> LayerCache:
    """The cache with one more token of each sequence.

    Args:
      cache: the cache.
      key: [B, 1, K, H].
      value: [B, 1, K, H].
      positions: int32 [B], the place of each sequence's token.
    """

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.swapaxes(new, 1, 2)
        if len(positions) == 1:  # As a scatter, XLA would read what was there first.
            return lax.dynamic_update_slice_in_dim(old, new, positions[0], 2)
        place = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
        return jax.vmap(place)(old, new, positions)

    return LayerCache(write(cache.key, key), write(cache.value, value))


def attend(
    query: jax.Array,
    cache: LayerCache,
    positions: jax.Array,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one token of each sequence to its cache, computed in float32.

    Args:
      query: [B, 1, N, H].
      cache: the keys and values, those of the token included.
      positions: int32 [B], the place of each token, the last that it attends to.
      window: number of tokens that a token attends to, itself included; None: all before it.
      sinks: [N], a score for each head that takes part in the softmax and has no value, or None.

    Returns:
      [B, 1, N, H].
    """
    batch, _, heads, size = query.shape
    grouped = query.reshape(batch, cache.key.shape[1], -1, size)
    scores = jnp.einsum("bkgh,bkch->bkgc", grouped, cache.key, preferred_element_type=jnp.float32)
    places = jnp.arange(cache.key.shape[2])[None]
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    scores = jnp.where(seen[:, None, None], scores * size**-0.5, -jnp.inf)
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1)
        own = jnp.broadcast_to(own, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, own], axis=-1)
    weights = jax.nn.softmax(scores)[..., : cache.key.shape[2]].astype(query.dtype)
    attended = jnp.einsum("bkgc,bkch->bkgh", weights, cache.value)
    return attended.reshape(batch, 1, heads, size)
