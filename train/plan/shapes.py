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

from models.config import LlamaConfig
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
    """

    inputs: int
    columns: int
    gathers: bool
    fp8: str | None

    @property
    def weights(self) -> int:
        return self.inputs * self.columns


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
        recipe = self._recipe
        linears = [
            Linear(features, queries + 2 * keys, True, recipe("layers.attention.projection")),
            Linear(queries, features, False, recipe("layers.attention.output")),
        ]
        if self.hidden:
            fp8 = recipe("layers.feed_forward")
            linears.append(Linear(features, 2 * self.hidden, True, fp8))
            linears.append(Linear(self.hidden, features, False, fp8))
        return tuple(linears)

    @functools.cached_property
    def head(self) -> Linear:
        return Linear(self.model.features, self.vocabulary, True, self._recipe("head"))

    def _recipe(self, name: str) -> str | None:
        config = self.config
        assert name in FP8_LAYERS
        matches = any(fnmatch.fnmatch(name, part) for part in config.fp8_layers.split(","))
        return config.fp8 if matches else None

    @functools.cached_property
    def block_weights(self) -> int:
        """Weights of a block on a device before ZeRO shards them, experts left out."""
        return sum(linear.weights for linear in self.block)

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
        within = "fsdp" in expert_axes(self.config)
        return self.sizes.context if within else self.sizes.weight_shards

    @functools.cached_property
    def zero(self) -> int:
        """The level that shards something."""
        return self.config.zero if self.sizes.weight_shards > 1 else 0

    @functools.cached_property
    def dense_weights(self) -> int:
        """All weights of a device before ZeRO shards them, but for experts."""
        return self.model.num_layers * self.block_weights + self.vocabulary_weights

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
