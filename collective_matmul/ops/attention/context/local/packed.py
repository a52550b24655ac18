"""All attention of a device by one call of a kernel that takes parts.

A chunk of queries attends to the chunks from some one to itself, in the order of positions, with a
causal mask that ends at its last token. How many these are depends on the device, but in the zigzag
layout the two chunks of any device attend to 2 D + 1 together: arrays of keys have one shape on all
devices, nothing is masked away, and nothing is merged. Segments are further parts: a chunk of
queries has one part for each segment, and the keys of those that end before it have no query.

Legend: G groups of queries (chunks with a causal mask, else all tokens of the device), M segments,
C chunks of the sequence, c tokens of a chunk, T chunks of keys for all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.operands.arithmetic import add
from collective_matmul.ops.attention.context.pieces import (
    Piece,
    chunks_attended,
    number_of,
    pieces_of,
    rows_of_chunks,
)
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import AttentionKernel, Parts
from collective_matmul.ops.attention.request import AttentionRequest


class Group(NamedTuple):
    """Queries that attend to the chunks from `first` to `last`.

    Attributes:
      first: int32 scalar.
      last: int32 scalar.
      start: int32 scalar, the place of the first chunk among those of all groups.
    """

    first: jax.Array
    last: jax.Array
    start: jax.Array


class PackedAttention:
    """The parts of a request's device, and its attention.

    Args:
      request: the request.
      kernel: a kernel that takes parts.
      ids: int32 [B, C, c], from `ids_in_order`; or None.
    """

    def __init__(self, request: ContextRequest, kernel: AttentionKernel, ids: jax.Array | None):
        self.request = request
        self.kernel = kernel
        self.device = axis_index(request.axis_name)
        self.groups = self._groups()
        self.chunks_of_keys, self.is_exact = self._chunks_of_keys()
        self.parts = self._parts(ids)

    def forward(
        self, query: jax.Array, pieces: Mapping[Piece, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """`ContextBackend.forward`, given all pieces."""
        key, value = self._keys(pieces)
        out, log_sum_exp = self.kernel.forward_of_parts(
            _joined(query), key, value, self.parts, self._attention
        )
        batch, tokens = query.shape[:2]
        log_sum_exp = jnp.swapaxes(log_sum_exp.reshape(-1, batch, tokens), 0, 1)
        return out.reshape(query.shape), log_sum_exp

    def backward(
        self,
        query: jax.Array,
        pieces: Mapping[Piece, jax.Array],
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, dict[Piece, jax.Array]]:
        """The gradient of queries, and this device's terms for all pieces, [2, B, c, K, H]."""
        key, value = self._keys(pieces)
        statistics = jnp.swapaxes(log_sum_exp, 0, 1).reshape(query.shape[2], -1)
        dquery, *dkeys = self.kernel.backward_of_parts(
            _joined(query),
            key,
            value,
            _joined(out),
            statistics,
            _joined(cotangent),
            self.parts,
            self._attention,
        )
        return dquery.reshape(query.shape), self._terms(dkeys)

    @property
    def _attention(self) -> AttentionRequest:
        size = self.request.chunks.size
        queries = self.request.tokens // len(self.groups)
        keys = self.chunks_of_keys if len(self.groups) == 1 else self.chunks_of_keys - 1
        return self.request.attention(batch=1, queries=queries, keys=keys * size, segments=None)

    def _groups(self) -> list[Group]:
        request = self.request
        if not request.causal:
            none, last = jnp.int32(0), jnp.int32(request.chunks.count - 1)
            return [Group(none, last, none)]
        before = np.int32(request.chunks.chunks_before(request.window))
        groups, start = [], jnp.int32(0)
        for number in request.chunks.numbers(self.device):
            first = jnp.maximum(number - before, 0)
            groups.append(Group(first, number, start))
            start = start + number - first + 1
        return groups

    def _chunks_of_keys(self) -> tuple[int, bool]:
        """T, and whether all devices need as many."""
        chunks = self.request.chunks
        if not self.request.causal:
            return chunks.count, True
        needed = {
            sum(len(chunks_attended(chunks, self.request, number)) for number in own)
            for own in chunks.numbers_by_device()
        }
        return max(needed), len(needed) == 1

    def _parts(self, ids: jax.Array | None) -> Parts:
        """Parts of all sequences: in each, those of its groups, and one of unused keys."""
        request, chunks = self.request, self.request.chunks
        batch, segments = request.batch, request.segments or 1
        if ids is None:
            counts = jnp.full((batch, chunks.count, 1), chunks.size, jnp.int32)
        else:
            of_segments = ids[..., None] == jnp.arange(segments, dtype=jnp.int32)[None, None, None]
            counts = jnp.sum(of_segments, axis=2, dtype=jnp.int32)
        numbers = jnp.arange(chunks.count, dtype=jnp.int32)

        def within(chosen: jax.Array) -> jax.Array:
            """Tokens of each segment in some chunks: int32 [B, M]."""
            return jnp.sum(jnp.where(chosen[None, :, None], counts, 0), axis=1, dtype=jnp.int32)

        own = chunks.numbers(self.device)
        queries, keys = [], []
        for position, group in enumerate(self.groups):
            mine = own if len(self.groups) == 1 else [own[position]]
            queries.append(within(sum((numbers == n for n in mine), jnp.zeros(len(numbers), bool))))
            keys.append(within((numbers >= group.first) & (numbers <= group.last)))
        if not self.is_exact:
            used = jnp.sum(jnp.concatenate(keys, axis=1), axis=1, dtype=jnp.int32, keepdims=True)
            queries.append(jnp.zeros_like(used))
            keys.append(np.int32(self.chunks_of_keys * chunks.size) - used)
        joined = [jnp.concatenate(each, axis=1).reshape(-1) for each in (queries, keys)]
        return Parts(*joined)

    def _keys(self, pieces: Mapping[Piece, jax.Array]) -> jax.Array:
        """Keys and values of all groups, by positions in each: [2, B * T * c, K, H]."""
        places = lax.iota(jnp.int32, self.chunks_of_keys)
        numbers = jnp.broadcast_to(self.groups[0].last, places.shape)
        for group in self.groups:
            number = group.first + places - group.start
            is_own = (places >= group.start) & (number <= group.last)
            numbers = jnp.where(is_own, number, numbers)
        rows = rows_of_chunks(self.request, self.device, numbers)
        stacked = jnp.stack([pieces[piece] for piece in pieces_of(self.request)], axis=2)
        taken = jnp.take(stacked, rows, axis=2)  # [2, B, T, c, K, H]
        return taken.reshape(2, -1, *taken.shape[4:])

    def _terms(self, dkeys: list[jax.Array]) -> dict[Piece, jax.Array]:
        """The terms of each piece: the sum over the groups that attend to it."""
        request, size = self.request, self.request.chunks.size
        shape = request.batch, self.chunks_of_keys, size
        both = jnp.stack([each.reshape(*shape, *each.shape[1:]) for each in dkeys])
        terms = {}
        for piece in pieces_of(request):
            number = number_of(request, self.device, piece)
            found = []
            for group in self.groups:
                is_attended = (number >= group.first) & (number <= group.last)
                place = jnp.where(is_attended, group.start + number - group.first, 0)
                term = lax.dynamic_index_in_dim(both, place, axis=2, keepdims=False)
                found.append(jnp.where(is_attended, term, jnp.zeros_like(term)))
            terms[piece] = add(*found)
        return terms


def _joined(heads: jax.Array) -> jax.Array:
    """[B, s, N, H] -> [B * s, N, H]."""
    return heads.reshape(-1, *heads.shape[2:])
