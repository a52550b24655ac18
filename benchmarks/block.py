"""``python -m benchmarks block``: Llama blocks in one executable, each with its own weights.

A block is attention, then a gated feed-forward, each behind a norm and added to the residual, of
one sequence. Legend of global shapes: S tokens, sharded between the halves of a block; K features;
F hidden features and H heads, of which C for keys and values, of size d, sharded within a half.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import comparison
from benchmarks import contenders as taking_part
from benchmarks.arrays import RandomArray
from benchmarks.communication import COLUMNS, ROWS, Communication, Rows
from benchmarks.comparison import Comparison
from benchmarks.contenders import Contender
from benchmarks.programs import Direction, Operands, Program, layers_program
from benchmarks.report import Report
from benchmarks.settings import check_names
from models import rotary
from models.attention import causal_attention
from models.config import PRESETS, LlamaConfig


class Weights(NamedTuple):
    """Of one block."""

    query: Any
    """[K, H*d]"""
    key: Any
    """[K, C*d]"""
    value: Any
    """[K, C*d]"""
    output: Any
    """[H*d, K]"""
    gate: Any
    """[K, F]"""
    up: Any
    """[K, F]"""
    down: Any
    """[F, K]"""


@dataclass(frozen=True)
class BlockCase:
    """One program, that every contender writes its own way."""

    model: str
    tokens: int
    direction: Direction
    layers: int

    @property
    def name(self) -> str:
        return f"{self.model} block S={self.tokens} {self.direction}"

    @property
    def config(self) -> LlamaConfig:
        return PRESETS[self.model]()

    @property
    def divided_sizes(self) -> dict[str, int]:
        names = ("num_heads", "num_key_value_heads", "hidden_features")
        return {"sequence_length": self.tokens, **{n: getattr(self.config, n) for n in names}}

    def describe(self, operands: Operands) -> dict[str, Any]:
        chunk = self.tokens // operands.mesh.devices.size * self.config.features
        return {**asdict(self), "chunk_bytes": chunk * operands.dtype.itemsize}

    def build(self, operands: Operands, contender: Contender) -> Program:
        """The program: see `build`."""
        return build(self, operands, contender)


@dataclass(frozen=True, kw_only=True)
class Block(Comparison):
    """Llama blocks: attention and feed-forward."""

    models: tuple[str, ...] = ("llama3-8b", "llama3-70b")
    """Whose blocks: debug, llama3-8b, llama3-70b, llama3-405b."""
    sequence_lengths: tuple[int, ...] = (8192,)
    """Tokens of the one sequence."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    layers: int = 2
    """Blocks of every stack."""

    def cases(self) -> list[BlockCase]:
        """Every model × length × direction."""
        return [
            BlockCase(model, tokens, direction, self.layers)
            for model in self.models
            for tokens in self.sequence_lengths
            for direction in self.directions
        ]


def run(settings: Block) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("models", settings.models, list(PRESETS))
    return comparison.run("block", settings, settings.cases(), taking_part.of_layers())


def build(case: BlockCase, operands: Operands, contender: Contender) -> Program:
    """The case as a contender's program: see `layers_program`."""
    communication, config = contender.communication, case.config
    k, f, d = config.features, config.hidden_features, config.head_dim
    queries, keys = config.num_heads * d, config.num_key_value_heads * d

    def forward(x, weights):
        for block_weights in weights:
            x = _attention(communication, config, block_weights, x)
            x = _feed_forward(communication, config, block_weights, x)
        return x

    def column(columns: int, seed: int) -> RandomArray:
        return operands.weight(COLUMNS, k, columns, seed)

    def row(rows: int, seed: int) -> RandomArray:
        return operands.weight(ROWS, rows, k, seed)

    weights = [
        Weights(
            query=column(queries, 4 * layer),
            key=column(keys, 4 * layer + 1),
            value=column(keys, 4 * layer + 2),
            output=row(queries, layer),
            gate=column(f, 2 * layer),
            up=column(f, 2 * layer + 1),
            down=row(f, layer),
        )
        for layer in range(case.layers)
    ]
    return layers_program(
        communication,
        case.direction,
        forward,
        weights,
        x=operands.both(case.tokens, k),
        cotangent=operands.both(case.tokens, k, seed=1),
    )


def _attention(
    communication: Communication, config: LlamaConfig, weights: Weights, x: Rows
) -> Rows:
    normed = communication.map(functools.partial(_norm, config), x)
    projections = communication.all_gather_matmul(
        normed, (weights.query, weights.key, weights.value)
    )
    query, key, value = (y.reshape(1, len(y), -1, config.head_dim) for y in projections)
    frequencies = rotary.frequencies(config)
    query, key = (rotary.rotate(heads, frequencies) for heads in (query, key))
    attended = causal_attention(query, key, value).reshape(len(projections[0]), -1)
    return communication.add(x, communication.matmul_reduce_scatter(attended, weights.output))


def _feed_forward(
    communication: Communication, config: LlamaConfig, weights: Weights, x: Rows
) -> Rows:
    normed = communication.map(functools.partial(_norm, config), x)
    gate, up = communication.all_gather_matmul(normed, (weights.gate, weights.up))
    hidden = jax.nn.silu(gate) * up
    return communication.add(x, communication.matmul_reduce_scatter(hidden, weights.down))


def _norm(config: LlamaConfig, x: jax.Array) -> jax.Array:
    """Root-mean-square norm without a scale, whose gradient the devices would have to sum."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + config.norm_epsilon)).astype(x.dtype)
