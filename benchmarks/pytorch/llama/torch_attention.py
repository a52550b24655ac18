"""Ways to attend with one token of each sequence to a cache of fixed capacity.

Legend as in `torch_decoder`. Positions are on the device, so that one CUDA graph computes any
token.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Cache = tuple[Tensor, Tensor]


class DecodeStep(NamedTuple):
    """The place of the tokens that are computed."""

    position: Tensor
    """int64 [1]."""
    seen: Tensor
    """bool [C]: the places up to it."""
    lengths: Tensor
    """int32 [B]: their number."""
    cos: Tensor
    """float32 [1, H / 2]."""
    sin: Tensor


class Attention(NamedTuple):
    """The layout of a cache and what reads it."""

    tokens_first: bool
    """Whether the cache is [B, C, K, H], not [B, K, C, H]."""
    attend: Callable[[Tensor, Cache, DecodeStep], Tensor]
    """Queries [B, N, H] -> [B, N, H]."""

    def empty(self, like: Tensor, batch: int, heads: int, capacity: int, size: int) -> Cache:
        """Zeros: what is not seen must be finite."""
        middle = (capacity, heads) if self.tokens_first else (heads, capacity)
        return tuple(like.new_zeros(batch, *middle, size) for _ in range(2))

    def write(self, cache: Cache, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Places [B, tokens, K, H] at positions [tokens]."""
        for whole, new in zip(cache, (key, value), strict=True):
            if self.tokens_first:
                whole.index_copy_(1, positions, new)
            else:
                whole.index_copy_(2, positions, new.transpose(1, 2))


def _grouped(query: Tensor, cache: Cache) -> Tensor:
    """The query heads of a key head are rows of one matrix: [B, N, H] -> [B, K, N / K, H]."""
    return query.unflatten(1, (cache[0].shape[1], -1))


def _by_matmuls(query: Tensor, cache: Cache, step: DecodeStep) -> Tensor:
    key, value = cache
    scores = torch.matmul(_grouped(query, cache), key.transpose(2, 3)).float()
    scores = (scores * query.shape[-1] ** -0.5).masked_fill(~step.seen, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(query.dtype), value).flatten(1, 2)


def _by_sdpa(query: Tensor, cache: Cache, step: DecodeStep) -> Tensor:
    grouped = _grouped(query, cache)
    seen = step.seen.expand(*grouped.shape[:-1], -1)
    return F.scaled_dot_product_attention(grouped, *cache, attn_mask=seen).flatten(1, 2)


def _by_flash_attention(query: Tensor, cache: Cache, step: DecodeStep) -> Tensor:
    """Flash attention of sequences of any lengths, which reads no more than what is seen."""
    batch, capacity = cache[0].shape[:2]
    queries = torch.arange(batch + 1, device=query.device, dtype=torch.int32)
    key, value = (part.flatten(0, 1) for part in cache)
    lengths = queries, queries * capacity, 1, capacity
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *lengths, 0.0, False, False, seqused_k=step.lengths
    )[0]


ATTENTIONS = {
    "matmuls": Attention(False, _by_matmuls),
    "sdpa": Attention(False, _by_sdpa),
    "flash": Attention(True, _by_flash_attention),
}
