"""Checks of attention's arguments: each is refused by a sentence, before anything is compiled."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp

from collective_matmul.ops.attention.segments import Segments

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_heads(query: Any, key: Any, value: Any) -> None:
    """Refuses queries, keys and values that do not fit, by sentences."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.dtype not in _DTYPES or array.dtype != query.dtype:
            raise TypeError(
                f"{name} of dtype {array.dtype}: expected one of {', '.join(_DTYPES)} for query,"
                f" key and value, and query has {query.dtype}; cast them"
            )
    heads, key_heads = query.shape[2], key.shape[2]
    if key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: expected keys and values"
            " of one shape, and the batch and head size of the query"
        )
    if heads % key_heads:
        raise ValueError(
            f"key of {key_heads} heads: expected a divisor of the query's {heads}; repeat heads of"
            " keys and values"
        )


def check_masks(
    query: Any, key: Any, causal: bool, window: int | None, scale: float | None
) -> int | None:
    """Refuses arguments that do not fit the shapes, by sentences; returns the window."""
    for name, array in (("query", query), ("key", key)):
        if len(getattr(array, "shape", ())) != 4 or 0 in array.shape:
            raise ValueError(
                f"{name} of shape {getattr(array, 'shape', None)}: expected [batch, tokens, heads,"
                " head size], none of them 0"
            )
    queries, keys = query.shape[1], key.shape[1]
    if causal and queries > keys:
        raise ValueError(
            f"causal=True with {queries} queries and {keys} keys: expected a key for each query;"
            " pass causal=False, or all keys"
        )
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(
            f"scale={scale!r}: expected a finite number that is known when the program is traced;"
            " multiply the query by another one"
        )
    if window is None:
        return None
    number = _whole(window)
    if number is None or number < 1 or not causal:
        raise ValueError(
            f"window={window!r} with causal={causal}: expected a positive number of tokens and"
            " causal=True"
        )
    return number


def _whole(number: Any) -> int | None:
    """The number if it is a whole one that is known when the program is traced, or None."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def check_sinks(query: Any, sinks: Any) -> None:
    """Refuses sinks that are not one for each head."""
    heads = query.shape[2]
    if sinks is not None and getattr(sinks, "shape", None) != (heads,):
        raise ValueError(
            f"sinks of shape {getattr(sinks, 'shape', None)}: expected an array [{heads}], a number"
            " for each head"
        )


def check_segments(query: Any, key: Any, segment_ids: Any, max_segments: int | None) -> None:
    """Refuses segments that are not those of the queries and keys."""
    given = isinstance(segment_ids, Segments)
    if max_segments is not None and (segment_ids is None or given):
        raise ValueError(
            f"max_segments={max_segments}: expected segment_ids as an array too; leave it out"
        )
    if segment_ids is None:
        return
    ids = segment_ids.ids if given else segment_ids
    if getattr(ids, "shape", None) != query.shape[:2] or key.shape[1] != query.shape[1]:
        raise ValueError(
            f"segment_ids of shape {getattr(ids, 'shape', None)} with {query.shape[1]} queries and"
            f" {key.shape[1]} keys: expected an array {query.shape[:2]}, and as many keys as"
            " queries"
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids of dtype {ids.dtype}: expected integers")
    if not given and (_whole(max_segments) or 0) < 1:
        raise ValueError(
            f"max_segments={max_segments}: expected the largest number of segments in a sequence, a"
            " whole number that is known when the program is traced"
        )
