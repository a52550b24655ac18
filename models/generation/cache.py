"""The keys and values of the tokens so far, and attention of one more token to them.

Legend of local shapes: B is batch, C the capacity of the cache in tokens, N query heads, K key and
value heads of this device, H head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models.config import LlamaConfig
from models.generation import valid_attention

#: What computes attention to a cache: a kernel that reads its valid part, and XLA's matmuls.
TRITON, XLA = "triton", "xla"
#: The compute capability of the GPUs that the kernel was measured on.
_HOPPER = "9.0"


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


def choose_attention(
    config: LlamaConfig, dtype: jax.typing.DTypeLike, device: Any, requested: str | None
) -> str:
    """Returns what computes attention to the caches of a model.

    Args:
      config: shape of the model.
      dtype: dtype of the caches.
      device: one of JAX's devices, which are alike.
      requested: a name; None for the kernel on Hopper GPUs, where it was measured, if it can
        compute the attention, and for XLA elsewhere.

    Raises:
      ValueError: for an unknown name, or if the kernel is requested and cannot.
    """
    if requested not in (None, TRITON, XLA):
        raise ValueError(f"cache_attention={requested!r}: expected None, {TRITON!r} or {XLA!r}")
    if requested == XLA:
        return XLA
    heads = config.num_heads // config.num_key_value_heads
    reason = valid_attention.unsupported_reason(heads, config.head_dim, dtype, device)
    if requested is None:
        measured = getattr(device, "compute_capability", None) == _HOPPER
        return TRITON if measured and reason is None else XLA
    if reason is not None:
        raise ValueError(f"cache_attention={TRITON!r}: {reason}; pass {XLA!r}")
    return TRITON


def attend(
    query: jax.Array,
    cache: LayerCache,
    positions: jax.Array,
    window: int | None,
    sinks: jax.Array | None = None,
    *,
    implementation: str = XLA,
) -> jax.Array:
    """Attention of one token of each sequence to its cache, computed in float32.

    Args:
      query: [B, 1, N, H].
      cache: the keys and values, those of the token included.
      positions: int32 [B], the place of each token, the last that it attends to.
      window: number of tokens that a token attends to, itself included; None: all before it.
      sinks: [N], a score for each head that takes part in the softmax and has no value, or None.
      implementation: what computes it, as `choose_attention` returns it.

    Returns:
      [B, 1, N, H].
    """
    batch, _, _, size = query.shape
    grouped = query.reshape(batch, cache.key.shape[1], -1, size)
    if sinks is not None:
        sinks = sinks.reshape(grouped.shape[1:3])
    compute = valid_attention.attend_to_valid if implementation == TRITON else _attend_to_all
    return compute(grouped, *cache, positions, window, sinks).reshape(query.shape)


def _attend_to_all(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """`valid_attention.attend_to_valid` by XLA, which reads all of the cache behind a mask."""
    scores = jnp.einsum("bkgh,bkch->bkgc", query, key, preferred_element_type=jnp.float32)
    places = jnp.arange(key.shape[2])[None]
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    scores = jnp.where(seen[:, None, None], scores * query.shape[-1] ** -0.5, -jnp.inf)
    if sinks is not None:
        own = sinks.astype(jnp.float32)[None, ..., None]
        own = jnp.broadcast_to(own, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, own], axis=-1)
    weights = jax.nn.softmax(scores)[..., : key.shape[2]].astype(query.dtype)
    return jnp.einsum("bkgc,bkch->bkgh", weights, value)
