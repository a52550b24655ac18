"""The shapes of Llama-style models, and the mesh axes that they fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: More layers would be built one by one for ever, and larger heads have gigabytes of frequencies.
_LARGEST = {"num_layers": 10_000, "head_dim": 2**16}
_LARGEST_INTEGER = 2**31 - 1


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: expected a positive number")


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies to longer contexts, as in Llama 3.1 or by YaRN.

    Sources: Llama Team, "The Llama 3 Herd of Models", 2024, and its reference implementation; Peng
    et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, and Hugging
    Face's implementation.
    """

    factor: float = 1.0
    """Factor for wavelengths longer than the original context; 1 changes no frequency."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    """Length in tokens of the context that the model was first trained with."""
    kind: Literal["llama3", "yarn"] = "llama3"
    """Which frequencies are scaled, and whether attention is; yarn is what Qwen's models use."""
    beta_fast: float = 32.0
    """Of yarn: waves that turn more often than this in the original context are not scaled."""
    beta_slow: float = 1.0
    """Of yarn: waves that turn less often are scaled by the whole factor."""
    attention_factor: float | None = None
    """Of yarn: multiplies rotated queries and keys; default: 1 + 0.1 × the logarithm of factor."""
    truncate: bool = True
    """Of yarn: whether the range of partly scaled waves is rounded outwards to whole pairs."""

    def __post_init__(self) -> None:
        positive = ("factor", "low_frequency_factor", "high_frequency_factor")
        for name in (*positive, "beta_fast", "beta_slow"):
            _check_positive(name, getattr(self, name))
        if not self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor={self.low_frequency_factor}: expected less than"
                f" high_frequency_factor={self.high_frequency_factor}"
            )
        if self.original_context < 1:
            raise ValueError(f"original_context={self.original_context}: expected at least 1")
        if self.kind not in ("llama3", "yarn"):
            raise ValueError(f"kind={self.kind!r}: expected llama3 or yarn")
        if self.attention_factor is not None:
            _check_positive("attention_factor", self.attention_factor)
        if not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow={self.beta_slow}: expected less than beta_fast={self.beta_fast}"
            )
        if self.kind == "yarn" and self.factor < 1:
            raise ValueError(f"factor={self.factor}: expected at least 1 with kind='yarn'")


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama-style transformer: of Llama itself, or of a family that differs in what
    the fields from `family` on say. Their defaults are Llama's."""

    vocabulary_size: int
    """Number of rows of the embedding and of columns of the head."""
    num_layers: int
    features: int
    """Width of the residual stream."""
    hidden_features: int
    """Width of the hidden layer of the gated feed-forward, or of each expert's."""
    num_heads: int
    num_key_value_heads: int
    """Number of key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int
    rotary_base: float = 500_000.0
    rotary_scaling: RotaryScaling = RotaryScaling()
    norm_epsilon: float = 1e-5
    tied_head: bool = False
    """Whether the head is the transposed embedding."""
    family: str = "llama"
    """Name of the family in `models.families`: how Hugging Face's files name the same model."""
    projection_bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    attention_sinks: bool = False
    """Whether each head has a learnt score that takes part in its softmax and has no value."""
    query_key_norm: bool = False
    """Whether each head of queries and keys is normed before the rotary embedding."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all before it."""
    full_attention_period: int | None = None
    """Of so many layers the last attends to all tokens before it, whatever sliding_window is; None:
    no layer does."""
    num_experts: int | None = None
    """Number of experts of each layer, which take the place of its feed-forward; None: no
    experts."""
    num_experts_per_token: int | None = None
    """Number of experts that a router chooses for each token; None if there are no experts."""
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    expert_bias: bool = False
    """Whether routers and experts have biases."""
    expert_activation: Literal["silu", "gpt_oss"] = "silu"
    """The activation of experts, as `collective_matmul.expert_mlp` takes it."""
    router_loss_weight: float = 0.0
    """What the model was trained with: the weight, in its loss, of the one that balances
    experts."""
    context_length: int | None = None
    """Largest number of tokens that the model was made for; None: unknown."""
    padded_vocabulary_size: int | None = None
    """Number of rows of the embedding and of columns of the head, of which those past
    vocabulary_size stand for no token; None: vocabulary_size."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                most = _LARGEST.get(str(field.name), _LARGEST_INTEGER)
                if value < 1:
                    raise ValueError(f"{field.name}={value}: expected at least 1")
                if value > most:
                    raise ValueError(f"{field.name}={value}: expected at most {most}")
        for name in ("rotary_base", "norm_epsilon"):
            _check_positive(name, getattr(self, name))
        if self.rotary_scaling.kind == "yarn" and self.rotary_base <= 1:
            raise ValueError(
                f"rotary_base={self.rotary_base}: expected more than 1 with"
                " rotary_scaling.kind='yarn', which needs waves of different lengths"
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}; give each key-value head the"
                " same number of query heads"
            )
        self._check_experts()
        if self.full_attention_period is not None and self.sliding_window is None:
            raise ValueError(
                f"full_attention_period={self.full_attention_period}: the model has no"
                " sliding_window; give one, or leave out the period"
            )
        if self.vocabulary_rows < self.vocabulary_size:
            raise ValueError(
                f"padded_vocabulary_size={self.padded_vocabulary_size}: expected at least"
                f" vocabulary_size={self.vocabulary_size}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: rotary embedding turns pairs; expected an even number"
            )

    def _check_experts(self) -> None:
        experts, chosen = self.num_experts, self.num_experts_per_token
        if (experts is None) != (chosen is None):
            raise ValueError(
                f"num_experts={experts} and num_experts_per_token={chosen}: give both, or neither"
                " for a model without experts"
            )
        if experts is None and (self.expert_bias or self.expert_activation != "silu"):
            raise ValueError(
                f"expert_bias={self.expert_bias} and"
                f" expert_activation={self.expert_activation!r}: the model has no experts; give"
                " num_experts too"
            )
        if self.expert_activation not in ("silu", "gpt_oss"):
            raise ValueError(
                f"expert_activation={self.expert_activation!r}: expected silu or gpt_oss"
            )
        if experts is not None and chosen is not None and chosen > experts:
            raise ValueError(
                f"num_experts_per_token={chosen}: expected at most num_experts={experts}"
            )
        if not 0 <= self.router_loss_weight < math.inf:
            raise ValueError(
                f"router_loss_weight={self.router_loss_weight}: expected 0 or a positive number"
            )

    @property
    def longest_context(self) -> int | None:
        """Largest number of tokens whose positions the model distinguishes: its context, or that to
        which rotary frequencies are scaled if this is longer; None: unknown."""
        if self.context_length is None or self.rotary_scaling.factor == 1:
            return self.context_length
        scaled = self.rotary_scaling.factor * self.rotary_scaling.original_context
        return max(self.context_length, int(scaled))

    @property
    def layer_period(self) -> int:
        """The number of kinds of layers, which take turns."""
        return self.full_attention_period or 1

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, by its number."""
        is_full = self.full_attention_period and (layer + 1) % self.full_attention_period == 0
        return None if is_full else self.sliding_window

    @property
    def matmul_parameters(self) -> int:
        """The number of weights that every token is multiplied by: all matrices but the embedding,
        and but the experts that were not chosen."""
        attention = self.features * self.head_dim * 2 * (self.num_heads + self.num_key_value_heads)
        feed_forward = 3 * self.features * self.hidden_features
        if self.num_experts is not None:
            router = self.features * self.num_experts
            feed_forward = (self.num_experts_per_token or 0) * feed_forward + router
        head = self.features * self.vocabulary_size
        return self.num_layers * (attention + feed_forward) + head

    @property
    def vocabulary_rows(self) -> int:
        """The number of rows of the embedding, padding included."""
        return self.padded_vocabulary_size or self.vocabulary_size

    def padded_for(self, size: int) -> LlamaConfig:
        """Pads the vocabulary, if need be, so that a tensor axis of this size divides it.

        Padded sizes are multiples of 128, so that other axes divide them too. A size that is set
        stays.
        """
        if self.padded_vocabulary_size is not None or self.vocabulary_size % size == 0:
            return self
        multiple = math.lcm(size, _VOCABULARY_MULTIPLE)
        rows = -(-self.vocabulary_size // multiple) * multiple
        return dataclasses.replace(self, padded_vocabulary_size=rows)

    def key_value_copies(self, size: int) -> int:
        """The number of devices of a tensor axis of this size that have the same keys and values:
        1 unless there are more devices than heads of them."""
        return max(size // self.num_key_value_heads, 1)

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are sharded over the tensor axis, by name."""
        divided = "hidden_features" if self.num_experts is None else "num_experts"
        names = ("num_heads", "num_key_value_heads", divided)
        sizes = {name: getattr(self, name) for name in names}
        padded = self.padded_vocabulary_size is not None
        name = "padded_vocabulary_size" if padded else "vocabulary_size"
        return sizes | {name: self.vocabulary_rows}

    def fits_tensor_axis(self, size: int) -> bool:
        """Whether the model, with a padded vocabulary, can be sharded over an axis of this size."""
        sizes = self.padded_for(size).sharded_sizes
        return all(_is_sharded(name, value, size) for name, value in sizes.items())

    def check_tensor_axis(self, size: int) -> None:
        """Raises ValueError unless a tensor axis of this size divides all sharded sizes, or is a
        multiple of the number of key and value heads, which then are replicated."""
        for name, value in self.sharded_sizes.items():
            if not _is_sharded(name, value, size):
                values = [n for n in (value // size * size, -(-value // size) * size) if n]
                if name == "num_key_value_heads":
                    near = range(1, 2 * max(value, size) + 1)
                    values = [n for n in near if _is_sharded(name, n, size)]
                    values = sorted(sorted(values, key=lambda n: abs(n - value))[:2])
                axes = filter(self.fits_tensor_axis, range(1, self.num_heads + 1))
                nearest = sorted(sorted(axes, key=lambda n: abs(n - size))[:2])
                raise ValueError(
                    f"{name}={value} is not divisible by a tensor axis of {size} devices; nearest"
                    f" axes that work for this model: {' and '.join(map(str, nearest))}; nearest"
                    f" {name} that work: {' and '.join(map(str, values))}"
                )


def config_from_json(values: Mapping[str, Any]) -> LlamaConfig:
    """A configuration from its fields as JSON, as checkpoints hold it."""
    scaling = RotaryScaling(**values["rotary_scaling"])
    return LlamaConfig(**{**values, "rotary_scaling": scaling})


#: What padded vocabularies are multiples of.
_VOCABULARY_MULTIPLE = 128


def _is_sharded(name: str, value: int, size: int) -> bool:
    """Whether a tensor axis of this size can shard a size, or replicate it."""
    return value % size == 0 or (name == "num_key_value_heads" and size % value == 0)


def debug() -> LlamaConfig:
    """A model that trains in a minute on a laptop and shards over up to 8 devices."""
    return LlamaConfig(
        vocabulary_size=256,
        num_layers=2,
        features=128,
        hidden_features=384,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=8,
        rotary_base=10_000.0,
    )
