"""Sizes of the arrays of one device, by configuration and mesh.

Legend: E features, F hidden features, N and K heads of queries and of keys, H their size, V the
vocabulary, t the tensor axis. A tensor group has all features of `rows` tokens at a time, of which
each device has `local_rows` between matmuls.
"""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.config import LlamaConfig
from models.parameters.adapters import Training
from models.parameters.fp8_layers import FP8_LAYERS
from train.config.config import Config, MeshSizes
from train.config.experts import expert_axes, expert_devices, hidden_devices
from train.config.loss_chunks import loss_chunk
from train.parallel.kept_weights import keeps_weights


class Linear(NamedTuple):
    """A linear layer of a device: [rows, inputs] @ [inputs, columns].

    Attributes:
      gathers: whether its rows are gathered before, or its results scattered after.
      fp8: the recipe of its operands, or None.
      is_trained: whether its weight is.
      adapters: beside it; several layers that share a gather are one here.
      rank: of each adapter.
      adapted: columns of the layers that have one.
    """

    inputs: int
    columns: int
    gathers: bool
    fp8: str | None
    is_trained: bool = True
    adapters: int = 0
    rank: int = 0
    adapted: int = 0

    @property
    def weights(self) -> int:
        return self.inputs * self.columns

    @property
    def adapter_weights(self) -> int:
        """Numbers of A [inputs, rank] and B [rank, columns] of all adapters."""
        return self.rank * (self.adapters * self.inputs + self.adapted)

    @property
    def trained_weights(self) -> int:
        return self.adapter_weights + (self.weights if self.is_trained else 0)


@dataclass(frozen=True)
class Shapes:
    """The sizes of a device's part of one microbatch, and of its parameters."""

    config: Config
    sizes: MeshSizes

    @property
    def model(self) -> LlamaConfig:
        return self.config.model

    @property
    def microbatches(self) -> int:
        return self.config.gradient_accumulation_steps

    @functools.cached_property
    def sequences(self) -> int:
        """Sequences of a microbatch in a tensor group."""
        groups = self.sizes.data * self.sizes.fsdp * self.microbatches
        return max(self.config.batch_size // groups, 1)

    @functools.cached_property
    def rows(self) -> int:
        """Tokens of a microbatch in a tensor group."""
        return self.sequences * self.config.sequence_length // self.sizes.context

    @functools.cached_property
    def local_rows(self) -> int:
        return self.rows // self.sizes.tensor

    @functools.cached_property
    def attention_columns(self) -> tuple[int, int]:
        """Columns of queries, and of keys; values have as many as keys."""
        model, tensor = self.model, self.sizes.tensor
        copies = model.key_value_copies(tensor)
        keys = model.num_key_value_heads * copies // tensor
        return model.num_heads // tensor * model.head_dim, keys * model.head_dim

    @functools.cached_property
    def hidden(self) -> int:
        """Hidden features of a device; none if there are experts."""
        experts = self.model.num_experts is not None
        return 0 if experts else self.model.hidden_features // self.sizes.tensor

    @property
    def vocabulary(self) -> int:
        return -(-self.model.vocabulary_rows // self.sizes.tensor)

    @functools.cached_property
    def block(self) -> tuple[Linear, ...]:
        """The linear layers of a block, in the order of its forward."""
        features, (queries, keys) = self.model.features, self.attention_columns
        projected = dict(zip(("query", "key", "value"), (queries, keys, keys), strict=True))
        projected = {f"attention.projection.{name}": n for name, n in projected.items()}
        linears = [
            self._linear("layers.attention.projection", features, projected),
            self._linear("layers.attention.output", queries, {"attention.output": features}),
        ]
        if self.hidden:
            name = "layers.feed_forward"
            gated = {f"feed_forward.{part}": self.hidden for part in ("gate", "up")}
            linears.append(self._linear(name, features, gated))
            linears.append(self._linear(name, self.hidden, {"feed_forward.down": features}))
        return tuple(linears)

    def _linear(self, group: str, inputs: int, columns: dict[str, int]) -> Linear:
        """A linear layer, or several that share a gather.

        Args:
          group: with which it is multiplied in 8 bits.
          inputs: its inputs.
          columns: those of each layer by its path in a block.
        """
        lora = self.training.lora
        adapted = [number for path, number in columns.items() if lora.of(path) is not None]
        return Linear(
            inputs,
            sum(columns.values()),
            len(columns) > 1,
            self._recipe(group),
            any(self.training.trains(f"layers.{path}.kernel") for path in columns),
            len(adapted),
            lora.rank or 0,
            sum(adapted),
        )

    def operand(self, linear: Linear) -> int:
        """Numbers of what a device multiplies, before it gathers."""
        return (self.local_rows if linear.gathers else self.rows) * linear.inputs

    @functools.cached_property
    def training(self) -> Training:
        """Which parameters are trained."""
        return Training(self.config.lora, self.config.freeze)

    @functools.cached_property
    def head(self) -> Linear:
        name = "embedding" if self.model.tied_head else "head.kernel"
        trained = self.training.trains(name)
        return Linear(self.model.features, self.vocabulary, True, self._recipe("head"), trained)

    @functools.cached_property
    def embedding_is_trained(self) -> bool:
        return self.training.trains("embedding")

    def _recipe(self, name: str) -> str | None:
        config = self.config
        assert name in FP8_LAYERS
        matches = any(fnmatch.fnmatch(name, part) for part in config.fp8_layers.split(","))
        return (config.lora.base_format or config.fp8) if matches else None

    def is_stored_in_8_bits(self, linear: Linear) -> bool:
        """Whether a frozen weight is kept in 8 bits alone."""
        stored = self.config.lora.base_format is not None and linear.fp8 is not None
        return stored and not linear.is_trained

    @functools.cached_property
    def block_weights(self) -> int:
        """Weights of a block on a device before ZeRO shards them, experts left out."""
        return sum(linear.weights for linear in self.block)

    @functools.cached_property
    def trained_block_weights(self) -> int:
        """Weights of a block that are trained, with adapters, before ZeRO shards them."""
        return sum(linear.trained_weights for linear in self.block)

    @functools.cached_property
    def trained_vocabulary_weights(self) -> int:
        """Weights of embedding and head that are trained, before ZeRO shards them."""
        table = self.model.features * self.vocabulary
        head = 0 if self.model.tied_head else table * self.head.is_trained
        return head + table * self.embedding_is_trained

    @functools.cached_property
    def frozen_block_bytes(self) -> int:
        """Bytes of the weights of a block that are not trained, before ZeRO shards them."""
        width = np.dtype(self.config.compute_dtype).itemsize
        return sum(
            linear.weights * (1 if self.is_stored_in_8_bits(linear) else width)
            for linear in self.block
            if not linear.is_trained
        )

    @functools.cached_property
    def frozen_bytes(self) -> float:
        """Bytes of all weights of a device that are not trained."""
        width = np.dtype(self.config.compute_dtype).itemsize
        shards = self.weight_shards if self.zero == 3 else 1
        # Matmuls gather all but a table that is the head too, and a head in chunks.
        is_whole = self.model.tied_head, loss_chunk(self.config, self.sizes) is not None
        trained = self.embedding_is_trained, self.head.is_trained or self.model.tied_head
        tables = sum(
            1 if whole else 1 / shards
            for whole, is_trained in zip(is_whole, trained, strict=True)
            if not is_trained
        )
        vocabulary = width * self.model.features * self.vocabulary * tables
        return self.model.num_layers * self.frozen_block_bytes / shards + vocabulary

    @property
    def kept_weights(self) -> int:
        """Weights that the state has in the compute dtype too."""
        if not keeps_weights(self.config, self.sizes):
            return 0
        linears = [*self.model.num_layers * self.block, self.head]
        experts = self.model.num_layers * self.expert_weights
        return sum(linear.weights for linear in linears if linear.fp8 is None) + experts

    @functools.cached_property
    def expert_weights(self) -> int:
        """Weights of a block's experts on a device before ZeRO shards them."""
        model = self.model
        if model.num_experts is None:
            return 0
        experts = model.num_experts // expert_devices(self.config, self.sizes)
        return 3 * experts * model.features * self.expert_hidden

    @property
    def expert_hidden(self) -> int:
        """Hidden features of an expert on a device."""
        return self.model.hidden_features // hidden_devices(self.config, self.sizes)

    @property
    def expert_pairs(self) -> int:
        """Pairs of a token and an expert that a device multiplies, if experts are balanced."""
        chosen = self.model.num_experts_per_token or 0
        return self.local_rows * chosen * hidden_devices(self.config, self.sizes)

    @functools.cached_property
    def vocabulary_weights(self) -> int:
        """Weights of embedding and head on a device before ZeRO shards them."""
        return self.model.features * self.vocabulary * (1 if self.model.tied_head else 2)

    @functools.cached_property
    def weight_shards(self) -> int:
        """Devices that ZeRO shards a weight over, beside the tensor axis."""
        return self.sizes.weight_shards if self.config.zero else 1

    @functools.cached_property
    def expert_shards(self) -> int:
        """Devices that ZeRO shards an expert's weights over: not those with other experts."""
        if not self.config.zero:
            return 1
        return 1 if "fsdp" in expert_axes(self.config) else self.sizes.weight_shards

    @functools.cached_property
    def zero(self) -> int:
        """The level that shards something."""
        return self.config.zero if self.sizes.weight_shards > 1 else 0

    @functools.cached_property
    def dense_weights(self) -> int:
        """All trained weights of a device before ZeRO shards them, but for experts."""
        blocks = self.model.num_layers * self.trained_block_weights
        return blocks + self.trained_vocabulary_weights

    @functools.cached_property
    def all_expert_weights(self) -> int:
        return self.model.num_layers * self.expert_weights

    @functools.cached_property
    def local_weights(self) -> float:
        """Weights that a device updates."""
        dense = self.dense_weights / self.weight_shards
        return dense + self.all_expert_weights / self.expert_shards

    @functools.cached_property
    def logit_rows(self) -> int:
        """Tokens whose logits exist at one time."""
        chunk = loss_chunk(self.config, self.sizes)
        whole = self.config.sequence_length // self.sizes.context
        return self.sequences * min(chunk or whole, whole)

    @property
    def loss_is_in_chunks(self) -> bool:
        return self.logit_rows < self.rows
