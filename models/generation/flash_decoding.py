"""Attention of one token to its cache by two kernels: Dao et al., "Flash-Decoding", 2023.

The first divides the cache into parts, of which each finds a softmax of its own, and the second
combines them. XLA has four: two matmuls, the softmax, and a sum over parts of the second matmul.
It reads the whole cache, and these read the tokens that are there.

No GPU has run them so far. They need Pallas' Triton backend, which JAX 0.11.2 has deprecated.

Legend of local shapes: B is batch, C the capacity of the cache in tokens, N query heads, K key and
value heads of this device, G query heads of each, at least 16, H head size, P parts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from models.generation.cache import LayerCache
from models.parameter_use import as_varying

#: Tokens that are multiplied at once.
_BLOCK = 64
#: Triton multiplies no fewer rows.
_LEAST_ROWS = 16
#: Programs of the first kernel: two for each multiprocessor of a Hopper GPU.
_PROGRAMS = 264
#: Of what no token was seen. Infinity minus infinity would be no number.
_LOWEST = -1e30


def attend(
    query: jax.Array, cache: LayerCache, positions: jax.Array, window: int | None
) -> jax.Array:
    """The same as `models.generation.cache.attend`; on CPUs by an interpreter, outside `shard_map`.

    Args:
      query: [B, 1, N, H], with H a power of two of at least 16.
      cache: the keys and values; 64 divides C.
      positions: int32 [B].
      window: number of tokens that a token attends to, itself included; None: all before it.

    Returns:
      [B, 1, N, H].

    Raises:
      ValueError: for sizes that the kernels do not take, and for a mesh without GPUs.
    """
    batch, key_heads, capacity, size = cache.key.shape
    if capacity % _BLOCK or size < _LEAST_ROWS or size & (size - 1):
        raise ValueError(
            f"cache of {capacity} tokens with heads of {size}: expected a multiple of {_BLOCK}, and"
            f" a power of two of at least {_LEAST_ROWS}; use attention='xla'"
        )
    group = query.shape[2] // key_heads
    rows = max(pl.next_power_of_2(group), _LEAST_ROWS)
    grouped = query.reshape(batch, key_heads, group, size)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    wanted = min(pl.cdiv(_PROGRAMS, batch * key_heads), capacity // _BLOCK)
    parts = pl.next_power_of_2(wanted)
    like = jax.typeof(cache.key).manual_axis_type
    interpret = jax.default_backend() != "gpu"
    if interpret and like.varying:  # The interpreter's own indices vary over no axis.
        raise ValueError(
            "attention='flash_decoding' needs GPUs: JAX interprets kernels in no shard_map; use"
            " attention='xla'"
        )
    operands = [as_varying(x, like.varying) for x in (positions, grouped, *cache)]

    def call(kernel: Any, name: str, grid: Any, in_specs: Any, out_specs: Any, outs: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=[jax.ShapeDtypeStruct(*out, manual_axis_type=like) for out in outs],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name=name,
        )

    attend_to_part = functools.partial(
        _attend_to_part, blocks=pl.cdiv(capacity // _BLOCK, parts), window=window
    )
    whole = pl.BlockSpec((batch,), lambda b, k, p: (0,))
    heads, tokens = (
        pl.BlockSpec((None, None, length, size), lambda b, k, p: (b, k, 0, 0))
        for length in (rows, capacity)
    )
    part = pl.BlockSpec((None, None, None, rows), lambda b, k, p: (b, k, p, 0))
    part_sums = pl.BlockSpec((None, None, None, rows, size), lambda b, k, p: (b, k, p, 0, 0))
    shape = batch, key_heads, parts, rows
    found = call(
        attend_to_part,
        "attend_to_part",
        (batch, key_heads, parts),
        [whole, heads, tokens, tokens],
        [part, part, part_sums],
        [(shape, jnp.float32)] * 2 + [((*shape, size), jnp.float32)],
    )(*operands)
    # Each program combines the parts of one query head.
    row = pl.BlockSpec((None, None, parts, None), lambda b, k, g: (b, k, 0, g))
    row_sums = pl.BlockSpec((None, None, parts, None, size), lambda b, k, g: (b, k, 0, g, 0))
    (attended,) = call(
        _combine_parts,
        "combine_parts",
        (batch, key_heads, group),
        [row, row, row_sums],
        [pl.BlockSpec((None, None, None, size), lambda b, k, g: (b, k, g, 0))],
        [((batch, key_heads, group, size), query.dtype)],
    )(*found)
    return attended.reshape(query.shape)


def _attend_to_part(
    positions: Any,
    query: Any,
    key: Any,
    value: Any,
    largest_out: Any,
    total_out: Any,
    sums_out: Any,
    *,
    blocks: int,
    window: int | None,
) -> None:
    """The largest score of a part, the sum of the exponentials, and of them times values.

    Args:
      positions: a reference, [B].
      query: [G, H].
      key: [C, H].
      value: [C, H].
      largest_out: [G].
      total_out: [G].
      sums_out: [G, H].
      blocks: number of blocks of a part.
      window: as for `attend`.
    """
    position = positions[pl.program_id(0)]
    first = pl.program_id(2) * blocks
    end = jnp.minimum(first + blocks, position // _BLOCK + 1)
    if window is not None:
        first = jnp.maximum(first, (position + 1 - window) // _BLOCK)
    queries = query[...]
    rows, size = queries.shape

    def product(x: jax.Array, y: jax.Array, contracted: int) -> jax.Array:
        numbers = ((1,), (contracted,)), ((), ())
        return lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)

    def add_block(number: jax.Array, found: tuple) -> tuple:
        largest, total, sums = found
        tokens = pl.ds(number * _BLOCK, _BLOCK)
        scores = product(queries, key[tokens, :], 1) * size**-0.5
        places = number * _BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = places <= position
        if window is not None:
            seen &= places > position - window
        scores = jnp.where(seen, scores, -jnp.inf)
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        kept, weights = jnp.exp(largest - larger), jnp.exp(scores - larger[:, None])
        values = value[tokens, :]
        sums = sums * kept[:, None] + product(weights.astype(values.dtype), values, 0)
        return larger, total * kept + jnp.sum(weights, axis=1), sums

    zeros = jnp.zeros(rows, jnp.float32), jnp.zeros((rows, size), jnp.float32)
    found = lax.fori_loop(first, end, add_block, (jnp.full(rows, _LOWEST, jnp.float32), *zeros))
    largest_out[...], total_out[...], sums_out[...] = found


def _combine_parts(largest: Any, total: Any, sums: Any, attended: Any) -> None:
    """References [P], [P], [P, H] -> [H]."""
    shares = jnp.exp(largest[...] - jnp.max(largest[...], axis=0))
    wholes = jnp.sum(sums[...] * shares[:, None], axis=0)
    attended[...] = (wholes / jnp.sum(total[...] * shares, axis=0)).astype(attended.dtype)
