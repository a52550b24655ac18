"""A plain Llama 3 in PyTorch, or one of experts, with the numerics of `models.llama`.

Sequences are one after the other: [B * S, features]. So PyTorch fuses all gathers with matmuls.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from benchmarks.pytorch.llama.torch_expert_blocks import TorchExpertFeedForward
from benchmarks.pytorch.torch_programs import Place
from models.config import LlamaConfig

Linear = functools.partial(nn.Linear, bias=False)


class TorchNorm(nn.Module):
    """Root-mean-square norm; computes in float32, returns x's dtype."""

    def __init__(self, config: LlamaConfig, features: int | None = None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features or config.features))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * self.scale).to(x.dtype)


class TorchAttention(nn.Module):
    """Causal grouped-query attention. Under tensor parallelism it has some of the heads; heads of
    keys and values are repeated where the kernel wants as many as of queries."""

    def __init__(self, config: LlamaConfig, waves: Sequence[Tensor]):
        super().__init__()
        features, size = config.features, config.head_dim
        self.query = Linear(features, config.num_heads * size)
        self.key = Linear(features, config.num_key_value_heads * size)
        self.value = Linear(features, config.num_key_value_heads * size)
        self.output = Linear(config.num_heads * size, features)
        self.query_norm = self.key_norm = nn.Identity()
        if config.query_key_norm:
            self.query_norm, self.key_norm = TorchNorm(config, size), TorchNorm(config, size)
        # The waves are not buffers, which mixed precision would round.
        self.head_dim, self.waves, self.repeats = size, waves, 1

    def forward(self, x: Tensor) -> Tensor:
        sequences, size = (-1, len(self.waves[0])), (-1, self.head_dim)
        parts = [p(x).unflatten(-1, size) for p in (self.query, self.key, self.value)]
        query, key, value = (part.unflatten(0, sequences) for part in parts)
        query, key = self.query_norm(query), self.key_norm(key)
        heads = rotated(query, *self.waves), rotated(key, *self.waves), value
        heads = [heads[0], *(part.repeat_interleave(self.repeats, 2) for part in heads[1:])]
        heads = [x.transpose(1, 2) for x in heads]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(-2).flatten(0, 1))


class TorchFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = Linear(config.features, config.hidden_features)
        self.up = Linear(config.features, config.hidden_features)
        self.down = Linear(config.hidden_features, config.features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TorchBlock(nn.Module):
    """Attention, then feed-forward, or experts."""

    def __init__(
        self, config: LlamaConfig, waves: Sequence[Tensor], place: Place, dtype: torch.dtype
    ):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = TorchNorm(config), TorchNorm(config)
        self.attention = TorchAttention(config, waves)
        if config.num_experts is None:
            self.feed_forward = TorchFeedForward(config)
        else:
            self.feed_forward = TorchExpertFeedForward(config, place, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class TorchLlama(nn.Module):
    """Maps tokens [B, S] to logits [B * S, V]; angles are radians [S, head_dim / 2]. With targets
    it returns the mean loss, from logits of `chunk` tokens at a time."""

    def __init__(self, config: LlamaConfig, angles: Tensor, place: Place, dtype: torch.dtype):
        super().__init__()
        self.waves = waves = angles[:, None].cos(), angles[:, None].sin()
        self.embedding = nn.Embedding(config.vocabulary_size, config.features)
        blocks = (TorchBlock(config, waves, place, dtype) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm, self.dtype = TorchNorm(config), dtype
        self.head = Linear(config.features, config.vocabulary_size)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, chunk: int = 0) -> Tensor:
        x = self.embedding(tokens.flatten()).to(self.dtype)
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        if isinstance(x, DTensor):  # Sharded tokens.
            x = x.redistribute(placements=[Replicate()])
        parts = zip(x.split(chunk), targets.flatten().split(chunk), strict=True)
        terms = [_recomputed(_loss_of_chunk, *part, self.head.weight) for part in parts]
        return sum(terms[1:], terms[0]) / targets.numel()


def _loss_of_chunk(x: Tensor, targets: Tensor, head: Tensor) -> Tensor:
    """[tokens, features], [tokens], [V, features] -> the sum of their losses."""
    return F.cross_entropy(F.linear(x, head).float(), targets, reduction="sum")


_recomputed = functools.partial(checkpoint, use_reentrant=False)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns feature i with feature i + H / 2, in float32: [..., H], with waves [..., H / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
