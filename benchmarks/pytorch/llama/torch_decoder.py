"""Prefill and decoding of a Llama 3 with tensor parallelism, as `models.generation` computes them.

All prompts have the same length. Functions do not communicate, so that each can be compiled: a
layer leaves a term of a sum over devices, and the next function adds the sum to the residual.
Legend, of one device: B is batch, S prompt, C capacity of the cache, F features, H head size, N
query heads, K key and value heads, V vocabulary, D devices.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pytorch.llama.torch_attention import Attention, DecodeStep
from benchmarks.pytorch.llama.torch_llama import rotated
from benchmarks.pytorch.torch_programs import Place
from models.config import LlamaConfig


class LayerWeights(NamedTuple):
    """Weights are [out, in], as in torch.nn.Linear."""

    attention_norm: Tensor
    """[F]."""
    qkv: Tensor
    """[(N + 2 K) H, F]."""
    output: Tensor
    """[F, N H]."""
    feed_forward_norm: Tensor
    """[F]."""
    gate_up: Tensor
    """[2 hidden, F]."""
    down: Tensor
    """[F, hidden]."""


class Weights(NamedTuple):
    """The weights of one device."""

    embedding: Tensor
    """The whole vocabulary: [V D, F]."""
    layers: Sequence[LayerWeights]
    norm: Tensor
    """[F]."""
    head: Tensor
    """[V, F]."""


class Sizes(NamedTuple):
    """Heads of one device."""

    heads: int
    key_value_heads: int
    head_dim: int
    epsilon: float


class DecoderCollectives(Protocol):
    """How devices add up and gather."""

    def sum(self, term: Tensor) -> Tensor:
        """The sum over devices; it may replace the term."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[...] -> [D, ...]."""
        ...


def sizes_of(config: LlamaConfig, devices: int) -> Sizes:
    return Sizes(
        config.num_heads // devices,
        config.num_key_value_heads // devices,
        config.head_dim,
        config.norm_epsilon,
    )


def random_weights(config: LlamaConfig, place: Place, dtype: torch.dtype, seed: int) -> Weights:
    """Matrices of a normal distribution, each device's own but for the embedding."""
    whole, own = (torch.Generator(place.device) for _ in range(2))
    whole.manual_seed(seed)
    own.manual_seed(seed * 1000 + place.rank + 1)
    options = {"dtype": dtype, "device": place.device}
    sizes, features = sizes_of(config, place.devices), config.features
    hidden = config.hidden_features // place.devices
    vocabulary = config.vocabulary_size // place.devices

    def normal(*size: int, generator: torch.Generator = own) -> Tensor:
        return torch.empty(size, **options).normal_(std=0.02, generator=generator)

    def scale() -> Tensor:
        return torch.ones(features, **options)

    def layer() -> LayerWeights:
        query = sizes.heads * sizes.head_dim
        qkv = query + 2 * sizes.key_value_heads * sizes.head_dim
        attention = scale(), normal(qkv, features), normal(features, query)
        feed_forward = scale(), normal(2 * hidden, features), normal(features, hidden)
        return LayerWeights(*attention, *feed_forward)

    embedding = normal(config.vocabulary_size, features, generator=whole)
    layers = [layer() for _ in range(config.num_layers)]
    return Weights(embedding, layers, scale(), normal(vocabulary, features))


def begin(
    embedding: Tensor, waves: tuple[Tensor, Tensor], token: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """The residual [B, F] of tokens [B] at one position, and `DecodeStep` without it."""
    seen = torch.arange(len(waves[0]), device=token.device) <= position
    lengths = (position + 1).to(torch.int32).expand(len(token)).contiguous()
    return F.embedding(token, embedding), seen, lengths, waves[0][position], waves[1][position]


def attention_layer(
    sizes: Sizes,
    attention: Attention,
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    step: DecodeStep,
    x: Tensor,
    addend: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: [B, F], [B, F] -> residual [B, F] and a term of the next sum."""
    x = x + addend
    query, key, value = _heads(sizes, weights, x, step.cos, step.sin)
    attention.write(cache, key[:, None], value[:, None], step.position)
    attended = attention.attend(query, cache, step)
    return x, F.linear(attended.flatten(1), weights.output)


def prompt_attention_layer(
    sizes: Sizes,
    attention: Attention,
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    waves: tuple[Tensor, Tensor],
    batch: int,
    x: Tensor,
    addend: Tensor,
) -> tuple[Tensor, Tensor]:
    """Whole prompts: [B S, F], [B S, F] -> residual [B S, F] and a term of the next sum."""
    x = x + addend
    prompt = len(x) // batch
    cos, sin = (wave[:prompt].repeat(batch, 1) for wave in waves)
    heads = _heads(sizes, weights, x, cos, sin)
    query, key, value = (part.unflatten(0, (batch, prompt)) for part in heads)
    attention.write(cache, key, value, torch.arange(prompt, device=x.device))
    parts = (part.transpose(1, 2) for part in (query, key, value))
    attended = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return x, F.linear(attended.transpose(1, 2).reshape(len(x), -1), weights.output)


def feed_forward_layer(
    sizes: Sizes, weights: LayerWeights, x: Tensor, addend: Tensor
) -> tuple[Tensor, Tensor]:
    """SwiGLU: [rows, F], [rows, F] -> residual [rows, F] and a term of the next sum."""
    x = x + addend
    normed = F.rms_norm(x, x.shape[-1:], weights.feed_forward_norm, sizes.epsilon)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
    return x, F.linear(F.silu(gate) * up, weights.down)


def head(
    sizes: Sizes, norm: Tensor, weight: Tensor, first: int, x: Tensor, addend: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [B, V]; and the largest with its token, whose numbers begin at `first`: [B, 2]."""
    x = x + addend
    logits = F.linear(F.rms_norm(x, x.shape[-1:], norm, sizes.epsilon), weight)
    largest, token = logits.max(dim=-1)
    # Float32 has all numbers of tokens.
    return logits, torch.stack([largest.float(), (token + first).float()], dim=-1)


def choose(found: Tensor) -> Tensor:
    """The largest of all devices: [D, B, 2] -> tokens [B]."""
    device = found[..., 0].argmax(0)
    return found[..., 1].gather(0, device[None])[0].long()


class Functions(NamedTuple):
    """The functions above, as they are or compiled."""

    begin: Callable = begin
    attention_layer: Callable = attention_layer
    prompt_attention_layer: Callable = prompt_attention_layer
    feed_forward_layer: Callable = feed_forward_layer
    head: Callable = head
    choose: Callable = choose


class TorchDecoder:
    """The state of one device.

    Attributes:
      token: the last token of each sequence, int64 [B].
      position: its place, int64 [1].
      logits: of the token after it, [B, V].
    """

    def __init__(
        self,
        config: LlamaConfig,
        frequencies: Sequence[float],
        weights: Weights,
        place: Place,
        *,
        batch: int,
        capacity: int,
        attention: Attention,
    ):
        self.weights, self.attention, self.batch = weights, attention, batch
        self.sizes = sizes_of(config, place.devices)
        self.first = place.rank * len(weights.head)
        like = weights.head
        with place.device:
            angles = torch.outer(torch.arange(capacity), torch.tensor(frequencies))
            self.waves = angles.cos(), angles.sin()
            self.token = torch.zeros(batch, dtype=torch.int64)
            self.position = torch.zeros(1, dtype=torch.int64)
        self.logits = like.new_zeros(batch, len(like))
        self.zeros = like.new_zeros(batch, config.features)
        self.caches = [
            attention.empty(like, batch, self.sizes.key_value_heads, capacity, config.head_dim)
            for _ in weights.layers
        ]

    def prefill(self, run: Functions, communication: DecoderCollectives, tokens: Tensor) -> None:
        """Computes prompts [B, S] and the tokens after them."""
        x = F.embedding(tokens.flatten(), self.weights.embedding)
        addend = torch.zeros_like(x)
        for weights, cache in zip(self.weights.layers, self.caches, strict=True):
            arguments = self.sizes, self.attention, weights, cache, self.waves, self.batch
            x, term = run.prompt_attention_layer(*arguments, x, addend)
            addend = communication.sum(term)
            x, term = run.feed_forward_layer(self.sizes, weights, x, addend)
            addend = communication.sum(term)
        last = [rows.unflatten(0, tokens.shape)[:, -1].contiguous() for rows in (x, addend)]
        self._finish(Functions(), communication, *last)
        self.position.fill_(tokens.shape[1])

    def step(self, run: Functions, communication: DecoderCollectives) -> None:
        """Computes one token of each sequence."""
        embedding = self.weights.embedding
        x, *rest = run.begin(embedding, self.waves, self.token, self.position)
        step, addend = DecodeStep(self.position, *rest), self.zeros
        for weights, cache in zip(self.weights.layers, self.caches, strict=True):
            arguments = self.sizes, self.attention, weights, cache, step
            x, term = run.attention_layer(*arguments, x, addend)
            addend = communication.sum(term)
            x, term = run.feed_forward_layer(self.sizes, weights, x, addend)
            addend = communication.sum(term)
        self._finish(run, communication, x, addend)
        self.position.add_(1)

    def _finish(
        self, run: Functions, communication: DecoderCollectives, x: Tensor, addend: Tensor
    ) -> None:
        arguments = self.sizes, self.weights.norm, self.weights.head, self.first
        logits, found = run.head(*arguments, x, addend)
        self.logits.copy_(logits)
        self.token.copy_(run.choose(communication.gather(found)))


def _heads(
    sizes: Sizes, weights: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, F] -> rotated queries [rows, N, H], rotated keys and values [rows, K, H]."""
    normed = F.rms_norm(x, x.shape[-1:], weights.attention_norm, sizes.epsilon)
    heads = F.linear(normed, weights.qkv).unflatten(-1, (-1, sizes.head_dim))
    counts = sizes.heads, sizes.key_value_heads, sizes.key_value_heads
    query, key, value = heads.split(counts, dim=1)
    cos, sin = cos[:, None], sin[:, None]
    return rotated(query, cos, sin), rotated(key, cos, sin), value
