"""Attention by XLA with masks that are made of positions and of numbers of segments.

Queries are attended for in tiles, one after the other, so that the scores of all of them are never
in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients
from collective_matmul.ops.attention.xla_attention import attend_where, gradients_where

#: Bytes of the scores of a tile, about. Scores are in float32.
_TILE_BYTES = 2**28


class Tokens(NamedTuple):
    """Where tokens are in the sequence. No token attends to one whose position is negative.

    Attributes:
      positions: int32 [n].
      ids: int32 [B, n], numbers of segments, or None.
    """

    positions: jax.Array
    ids: jax.Array | None


def attend_by_positions(
    request: ContextRequest,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    queries: Tokens,
    keys: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """The sums [B, S, N, H] and the log-sum-exp [B, N, S] of S queries and T keys.

    Args:
      request: says what is masked.
      query: [B, S, N, H].
      key: [B, T, K, H].
      value: [B, T, K, H].
      queries: where the queries are.
      keys: where the keys are.
    """

    def tile(operands: Any) -> tuple[jax.Array, jax.Array]:
        query, of_queries = operands
        return attend_where(_seen(request, of_queries, keys), query, key, value, request.scale)

    tiles = _tiles(query, key)
    if tiles == 1:
        return tile((query, queries))
    out, log_sum_exp = lax.map(tile, (_cut(query, 1, tiles), _cut_tokens(queries, tiles)))
    return _joined(out, 1), _joined(log_sum_exp, 2)


def gradients_by_positions(
    request: ContextRequest,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    queries: Tokens,
    keys: Tokens,
    out: jax.Array,
    log_sum_exp: jax.Array,
    cotangent: jax.Array,
) -> Gradients:
    """The gradients, given a log-sum-exp and sums which may be of further keys too."""

    def tile(query: Any, of_queries: Tokens, out: Any, log_sum_exp: Any, dy: Any) -> Gradients:
        seen = _seen(request, of_queries, keys)
        return gradients_where(seen, query, key, value, out, log_sum_exp, dy, request.scale)

    tiles = _tiles(query, key)
    if tiles == 1:
        return tile(query, queries, out, log_sum_exp, cotangent)
    wide = log_sum_exp.dtype

    def step(sums: Any, operands: Any) -> tuple[Any, jax.Array]:
        dquery, *terms = tile(*operands)
        return [total + term.astype(wide) for total, term in zip(sums, terms, strict=True)], dquery

    of_tiles = (
        _cut(query, 1, tiles),
        _cut_tokens(queries, tiles),
        _cut(out, 1, tiles),
        _cut(log_sum_exp, 2, tiles),
        _cut(cotangent, 1, tiles),
    )
    # Zeros of the type of the terms, which may vary over mesh axes.
    zeros = [
        jnp.zeros_like(each, wide) + jnp.zeros_like(query[:, :1, :1], wide) for each in (key, value)
    ]
    (dkey, dvalue), dquery = lax.scan(step, zeros, of_tiles)
    return _joined(dquery, 1), dkey.astype(key.dtype), dvalue.astype(value.dtype)


def _seen(request: ContextRequest, queries: Tokens, keys: Tokens) -> jax.Array:
    """Whether each query attends to each key: bool [B or 1, 1, 1, S, T]."""
    rows, columns = queries.positions[:, None], keys.positions[None]
    seen = columns >= 0
    if request.causal:
        seen &= columns <= rows
    else:
        seen = jnp.broadcast_to(seen, (rows.shape[0], columns.shape[1]))
    if request.window is not None:
        seen &= columns > rows - jnp.int32(request.window)
    seen = seen[None, None, None]
    if queries.ids is not None and keys.ids is not None:
        seen &= (queries.ids[:, :, None] == keys.ids[:, None, :])[:, None, None]
    return seen


def _tiles(query: jax.Array, key: jax.Array) -> int:
    """The number of tiles, which divides the number of queries."""
    batch, queries, heads, _ = query.shape
    row_bytes = 4 * batch * heads * key.shape[1]
    wanted = max(1, -(-row_bytes * queries // _TILE_BYTES))
    return next(n for n in range(min(wanted, queries), queries + 1) if queries % n == 0)


def _cut_tokens(tokens: Tokens, tiles: int) -> Tokens:
    ids = None if tokens.ids is None else _cut(tokens.ids, 1, tiles)
    return Tokens(_cut(tokens.positions, 0, tiles), ids)


def _cut(array: jax.Array, dimension: int, tiles: int) -> jax.Array:
    """[..., n, ...] -> [tiles, ..., n / tiles, ...]."""
    shape = list(array.shape)
    shape[dimension : dimension + 1] = [tiles, shape[dimension] // tiles]
    return jnp.moveaxis(array.reshape(shape), dimension, 0)


def _joined(array: jax.Array, dimension: int) -> jax.Array:
    """[tiles, ..., n / tiles, ...] -> [..., n, ...]; `dimension` is that of the result."""
    array = jnp.moveaxis(array, 0, dimension)
    shape = list(array.shape)
    shape[dimension : dimension + 2] = [shape[dimension] * shape[dimension + 1]]
    return array.reshape(shape)
