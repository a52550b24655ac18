"""The forward of `models.llama.Llama` with a cache, for use inside `jax.shard_map`.

A prompt goes through the collective matmuls with its sequence sharded between layers, as in
training. One token cannot be divided: then column-parallel layers do not gather, and row-parallel
ones sum over the tensor axis. Legend of local shapes: B is batch, S the padded length of prompts, D
the size of the tensor axis, V the vocabulary. If a context axis of C devices divides prompts, S is
the S/C tokens of a device in `prefill`, in the zigzag layout, and caches have all tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul import zigzag_order
from models.generation.cache import XLA, LayerCache, appended, attend, filled
from models.layers import vocabulary
from models.layers.documents import locate_part
from models.llama import Block, Llama

Caches = list[LayerCache]

#: Rows of matmuls. XLA computes the product of one row and a weight that it takes for small, as of
#: queries and of attention's output, without a matmul: products are rounded to the weight's dtype
#: and written to memory, and other weights are transposed at each launch.
_LEAST_ROWS = 2


def prefill(
    model: Llama, tokens: jax.Array, lengths: jax.Array, capacity: int
) -> tuple[jax.Array, Caches]:
    """Computes prompts.

    Args:
      model: the model, whose parameters are in its `dtype`.
      tokens: int32 [B, S], with anything after each prompt; D divides S.
      lengths: int32 [B], the lengths of the prompts.
      capacity: number of tokens that the caches have place for, at least S.

    Returns:
      [B, V/D], the logits of the token after each prompt; and the cache of each layer. What it
      holds after a prompt is overwritten before it is read.
    """

    axis = None if model.context is None else model.context.name
    places = None if axis is None else locate_part(None, tokens.shape[1], axis).positions

    @jax.jit
    def apply(block: Block, x: jax.Array) -> tuple[jax.Array, LayerCache]:
        attention = block.attention
        query, key, value = attention.heads(block.attention_norm(x), places)
        x = x + attention.output(attention.attend(query, key, value))
        x = x + block.feed(block.feed_forward_norm(x))[0]
        if axis is not None:
            key, value = _in_order(key, axis), _in_order(value, axis)
        return x, filled(key, value, capacity)

    x, caches = _embed(model, tokens), []
    for block in _blocks(model):
        x, cache = apply(block, x)
        caches.append(cache)
    return _logits(model, _last_rows(x, lengths, model.axis_name, places, axis)), caches


def decode(
    model: Llama,
    tokens: jax.Array,
    positions: jax.Array,
    caches: Caches,
    attention: str = XLA,
) -> tuple[jax.Array, Caches]:
    """Computes one token of each sequence.

    Args:
      model: the model.
      tokens: int32 [B].
      positions: int32 [B], their places in the sequences.
      caches: the cache of each layer.
      attention: what computes attention to them, as `cache.choose_attention` returns it.

    Returns:
      [B, V/D], the logits of the next token; and the caches with these tokens.
    """

    batch, rows = len(tokens), max(len(tokens), _LEAST_ROWS)

    @jax.jit
    def apply(block: Block, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        layer = block.attention
        heads = layer.heads(block.attention_norm(x), positions[:, None])
        query, key, value = (each[:batch] for each in heads)
        cache = appended(cache, key, value, positions)
        sinks = None if layer.sinks is None else layer.sinks[...]
        attended = attend(query, cache, positions, layer.window, sinks, implementation=attention)
        x = x + layer.output(_with_rows(attended, rows))
        return x + block.feed(block.feed_forward_norm(x))[0], cache

    x, written = _with_rows(_embed(model, tokens[:, None]), rows), []
    for block, cache in zip(_blocks(model), caches, strict=True):
        x, cache = apply(block, x, cache)
        written.append(cache)
    return _logits(model, x)[:batch], written


def _with_rows(x: jax.Array, rows: int) -> jax.Array:
    """[B, ...] -> [rows, ...], where rows is B, or B is 1 and its row is repeated."""
    return jnp.broadcast_to(x, (rows, *x.shape[1:]))


def _blocks(model: Llama) -> Any:
    return model.layers


def _embed(model: Llama, tokens: jax.Array) -> jax.Array:
    """int32 [B, S] -> [B, S/D, features], or [B, S, features] if D does not divide S."""
    table = model.embedding[...].astype(model.dtype)
    return vocabulary.embed(tokens, table, model.axis_name)


def _in_order(heads: jax.Array, axis_name: str) -> jax.Array:
    """Keys or values of all devices in the order of positions: [B, S/C, K, H] -> [B, S, K, H]."""
    devices = lax.axis_size(axis_name)
    # Chunks change places, not tokens.
    chunks = heads.reshape(len(heads), 2, -1, *heads.shape[2:])
    chunks = lax.all_gather(chunks, axis_name, axis=1, tiled=True)
    chunks = jnp.take(chunks, np.argsort(zigzag_order(2 * devices, devices)), axis=1)
    return chunks.reshape(len(heads), -1, *heads.shape[2:])


def _last_rows(
    x: jax.Array,
    lengths: jax.Array,
    axis_name: str,
    places: jax.Array | None,
    context: str | None,
) -> jax.Array:
    """The row of each sequence's last token, on every device: [B, S/D, features] -> [B, 1,
    features]. `places` [1, S] are the positions of a device's part of prompts, if a context axis
    divides them."""
    rows = x.shape[1]
    last, first = lengths - 1, lax.axis_index(axis_name) * rows
    if places is None:
        own, axes = last - first, (axis_name,)
    else:
        is_last = places == last[:, None]
        own = jnp.where(is_last.any(axis=1), jnp.argmax(is_last, axis=1) - first, -1)
        axes = (axis_name, context)
    found = jnp.take_along_axis(x, own[:, None, None], axis=1, mode="fill", fill_value=0)
    found = jnp.where((own >= 0)[:, None, None], found, 0)
    return lax.psum(found, axes)


def _logits(model: Llama, x: jax.Array) -> jax.Array:
    """[B, 1, features], the same on every device -> [B, V/D]."""
    x = model.norm(x)
    if model.head is None:
        products = x @ model.embedding[...].astype(model.dtype).T
    else:
        products = model.head(x)
    return vocabulary.without_padding(products, model.vocabulary_size, model.axis_name)[:, 0]
