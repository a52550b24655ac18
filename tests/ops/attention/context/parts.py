"""Attention of parts by XLA: what FlashAttention-3 computes, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import pytest

from collective_matmul.ops.attention import choice
from collective_matmul.ops.attention.kernel import AttentionKernel, Gradients, Parts
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments
from collective_matmul.ops.attention.xla_attention import attend_where, gradients_where

NAME = "parts"


class PartsByXla(AttentionKernel):
    """All parts at once, with a mask. It attends by parts alone."""

    name = NAME
    takes_parts = True

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        del request

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        raise AssertionError("attends by parts alone")

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> Gradients:
        raise AssertionError("attends by parts alone")

    def forward_of_parts(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        parts: Parts,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        seen = _seen(parts, len(query), len(key), request)
        operands = query[None], key[None], value[None]
        out, log_sum_exp = attend_where(seen, *operands, request.scale)
        return out[0], log_sum_exp[0]

    def backward_of_parts(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
        parts: Parts,
        request: AttentionRequest,
    ) -> Gradients:
        seen = _seen(parts, len(query), len(key), request)
        kept = out[None], log_sum_exp[None], cotangent[None]
        found = gradients_where(seen, query[None], key[None], value[None], *kept, request.scale)
        return found[0][0], found[1][0], found[2][0]


def _seen(parts: Parts, queries: int, keys: int, request: AttentionRequest) -> jax.Array:
    """Whether each query attends to each key: bool [1, 1, 1, S, T]."""
    part_of_query, from_end = _places(parts.query_lengths, queries)
    part_of_key, key_from_end = _places(parts.key_lengths, keys)
    seen = part_of_query[:, None] == part_of_key[None]
    # The last query attends to the last key.
    ahead = from_end[:, None] - key_from_end[None]
    if request.causal:
        seen &= ahead <= 0
    if request.window is not None:
        seen &= ahead > -request.window
    return seen[None, None, None]


def _places(lengths: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The part of each token, and how many of the part follow it."""
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    index = jnp.arange(tokens, dtype=jnp.int32)
    part = jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    return part, ends[part] - 1 - index


@contextlib.contextmanager
def kernel_of_parts() -> Iterator[None]:
    """Inside the block, the kernel may be requested by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cast(dict, choice.KERNELS), NAME, PartsByXla())
        yield
