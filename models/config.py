"""The shapes of Llama models, presets of the published ones, and the mesh axes that they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies to longer contexts, as in Llama 3.1.

    Source: Llama Team, "The Llama 3 Herd of Models", 2024, and its reference implementation.
    """

    factor: float = 1.0
    """Factor for wavelengths longer than the original context; 1 changes nothing."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    """Length in tokens of the context that the model was first trained with."""


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama 3 transformer."""

    vocabulary_size: int
    """Number of rows of the embedding and of columns of the head."""
    num_layers: int
    features: int
    """Width of the residual stream."""
    hidden_features: int
    """Width of the hidden layer of the gated feed-forward."""
    num_heads: int
    num_key_value_heads: int
    """Number of key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int
    rotary_base: float = 500_000.0
    rotary_scaling: RotaryScaling = RotaryScaling()
    norm_epsilon: float = 1e-5
    tied_head: bool = False
    """Whether the head is the transposed embedding."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name}={value}: expected at least 1")
        for name in ("rotary_base", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}; give each key-value head the"
                " same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: rotary embedding turns pairs; expected an even number"
            )

    @property
    def matmul_parameters(self) -> int:
        """The number of weights that every token is multiplied by: all matrices but the
        embedding."""
        attention = self.features * self.head_dim * 2 * (self.num_heads + self.num_key_value_heads)
        feed_forward = 3 * self.features * self.hidden_features
        head = self.features * self.vocabulary_size
        return self.num_layers * (attention + feed_forward) + head

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """The sizes that are sharded over the tensor axis, by name."""
        names = ("num_heads", "num_key_value_heads", "hidden_features", "vocabulary_size")
        return {name: getattr(self, name) for name in names}

    def fits_tensor_axis(self, size: int) -> bool:
        """Whether a tensor axis of this size divides all sharded sizes."""
        return all(value % size == 0 for value in self.sharded_sizes.values())

    def check_tensor_axis(self, size: int) -> None:
        """Raises ValueError unless a tensor axis of this size divides all sharded sizes."""
        for name, value in self.sharded_sizes.items():
            if value % size:
                values = [n for n in (value // size * size, -(-value // size) * size) if n]
                axes = filter(self.fits_tensor_axis, range(1, value + 1))
                nearest = sorted(sorted(axes, key=lambda n: abs(n - size))[:2])
                raise ValueError(
                    f"{name}={value} is not divisible by a tensor axis of {size} devices; nearest"
                    f" {name} that work: {' and '.join(map(str, values))}; nearest axes that work"
                    f" for this model: {' and '.join(map(str, nearest))}"
                )


_STRETCHED = RotaryScaling(factor=8.0)


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


def llama3_8b() -> LlamaConfig:
    """Llama 3.1 8B."""
    return LlamaConfig(128_256, 32, 4096, 14_336, 32, 8, 128, rotary_scaling=_STRETCHED)


def llama3_70b() -> LlamaConfig:
    """Llama 3.1 70B."""
    return LlamaConfig(128_256, 80, 8192, 28_672, 64, 8, 128, rotary_scaling=_STRETCHED)


def llama3_405b() -> LlamaConfig:
    """Llama 3.1 405B."""
    return LlamaConfig(128_256, 126, 16_384, 53_248, 128, 8, 128, rotary_scaling=_STRETCHED)


PRESETS: dict[str, Callable[[], LlamaConfig]] = {
    "debug": debug,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
    "llama3-405b": llama3_405b,
}
