"""Causal attention within segments, by one call of cuDNN for each pack of them.

cuDNN returns a log-sum-exp for each segment, [b * M, N, tokens of a block], those of no segment
last, and takes it so: here it is brought to the order of tokens, [B, N, S], and back. A call leaves
rows of other packs as they are in memory, in its result and in its gradients.

Legend: B is batch, S sequence, N query heads, b blocks of a pack, M places for segments in a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import packed_attention
from collective_matmul.ops.attention.kernel import Gradients
from collective_matmul.ops.attention.segments import SEGMENTS_OF_ONE_PACK, Pack, Segments

#: Blocks times places of a block are a dimension of the grid of cuDNN's kernels.
_LARGEST_GRID = 2**16 - 1


class PackedSegments:
    """Attention of segments. Several calls are made if one would have too many places."""

    def __init__(self, segments: Segments, scale: float):
        self.packs = segments.packs
        self.scale = scale

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, forward_of: Callable[..., Any]
    ) -> tuple[jax.Array, jax.Array]:
        """The result and the log-sum-exp; arguments as those of a kernel.

        `forward_of` calls a function of the heads and returns its log-sum-exp too.
        """
        parts = []
        for packs, (q, k, v) in self._in_calls(query, key, value):
            outs, statistics = [], []
            for pack in packs:
                attend = self._attend(pack)
                out, rows = forward_of(attend, *(_in_blocks(x, pack) for x in (q, k, v)))
                outs.append(out.reshape(q.shape))
                statistics.append(_by_token(rows, pack))
            parts.append((_of_members(outs, packs, 1), _of_members(statistics, packs, 2)))
        outs, statistics = zip(*parts, strict=True)
        return _concatenated(outs), _concatenated(statistics)

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
        backward_of: Callable[..., Gradients],
    ) -> Gradients:
        """The gradients; arguments as those of a kernel."""
        parts = []
        operands = query, key, value, out, log_sum_exp, cotangent
        for packs, (q, k, v, o, rows, dy) in self._in_calls(*operands):
            terms = []
            for pack in packs:
                blocks = (_in_blocks(x, pack) for x in (q, k, v, o))
                term = backward_of(
                    self._attend(pack), *blocks, _by_place(rows, pack), _in_blocks(dy, pack)
                )
                terms.append([g.reshape(x.shape) for g, x in zip(term, (q, k, v), strict=True)])
            parts.append([_of_members(each, packs, 1) for each in zip(*terms, strict=True)])
        dquery, dkey, dvalue = (_concatenated(each) for each in zip(*parts, strict=True))
        return dquery, dkey, dvalue

    def _attend(self, pack: Pack) -> Callable[..., jax.Array]:
        return functools.partial(
            packed_attention, starts=pack.starts, lengths=pack.lengths, scale=self.scale
        )

    def _in_calls(
        self, *arrays: jax.Array
    ) -> Iterator[tuple[tuple[Pack, ...], tuple[jax.Array, ...]]]:
        """The packs and the arrays of as many sequences as one call takes."""

        def divide(packs: tuple[Pack, ...], arrays: tuple[jax.Array, ...]) -> Iterator[Any]:
            if all(pack.starts.size <= _LARGEST_GRID for pack in packs):
                yield packs, arrays
                return
            sequences = len(arrays[0])
            if sequences == 1:
                raise ValueError(
                    f"a sequence of {arrays[0].shape[1]} tokens with more than"
                    f" {SEGMENTS_OF_ONE_PACK} segments: cuDNN's attention takes at most"
                    f" {_LARGEST_GRID} places for segments; give shorter sequences, keep no"
                    " segments apart, or install the extra 'flash'"
                )
            for half in (slice(0, sequences // 2), slice(sequences // 2, sequences)):
                of_half = tuple(pack.of_sequences(half) for pack in packs)
                yield from divide(of_half, tuple(array[half] for array in arrays))

        yield from divide(self.packs, arrays)


def _in_blocks(x: jax.Array, pack: Pack) -> jax.Array:
    """[B, S, heads, H] -> [b, S * B / b, heads, H], without what is in no segment of the pack."""
    return x.reshape(len(pack.starts), -1, *x.shape[2:])


def _of_members(parts: Sequence[jax.Array], packs: Sequence[Pack], tokens: int) -> jax.Array:
    """Each token's value from the part of its pack. Tokens are a dimension of the parts."""
    if len(parts) == 1:
        return parts[0]
    total = jnp.zeros_like(parts[0])
    for part, pack in zip(parts, packs, strict=True):
        others = [i for i in range(part.ndim) if i not in (0, tokens)]
        total = jnp.where(jnp.expand_dims(pack.members, others), part, total)
    return total


def _concatenated(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _first_tokens(pack: Pack) -> jax.Array:
    """The first token of each place in all sequences, read as one: int32 [b * M].

    JAX gives the places that have a segment to cuDNN first, in their order. The others: -1.
    """
    blocks, tokens = len(pack.starts), pack.members.size
    first = pack.starts + (jnp.arange(blocks, dtype=jnp.int32) * (tokens // blocks))[:, None]
    ordered = jnp.sort(jnp.where(pack.lengths > 0, first, tokens).reshape(-1))
    return jnp.where(ordered < tokens, ordered, -1)


def _by_token(rows: jax.Array, pack: Pack) -> jax.Array:
    """[b * M, N, tokens of a block] -> [B, N, S]."""
    batch, tokens = pack.members.shape
    first = _first_tokens(pack)
    place = jnp.arange(len(first), dtype=jnp.int32)
    # The last place that begins at or before a token has it, if one of the pack has.
    begun = jnp.zeros(batch * tokens, place.dtype)
    begun = begun.at[jnp.where(first < 0, batch * tokens, first)].set(place, mode="drop")
    own = lax.cummax(begun)
    index = jnp.arange(batch * tokens, dtype=jnp.int32)
    inside = jnp.clip(index - first[own], 0, rows.shape[2] - 1)
    found = rows[own, :, inside]
    return jnp.swapaxes(found.reshape(batch, tokens, -1), 1, 2)


def _by_place(log_sum_exp: jax.Array, pack: Pack) -> jax.Array:
    """[B, N, S] -> [b * M, N, tokens of a block]; rows of no segment are any."""
    batch, heads, tokens = log_sum_exp.shape
    size = batch * tokens // len(pack.starts)
    flat = jnp.swapaxes(log_sum_exp, 1, 2).reshape(batch * tokens, heads)
    rows = _first_tokens(pack)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    rows = jnp.clip(rows, 0, batch * tokens - 1)
    return jnp.swapaxes(flat[rows], 1, 2)
