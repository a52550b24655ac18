"""`Lora`: a low-rank adapter beside a weight that does not change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import vary_over, varying_axes


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter of a linear layer: ``x W + scale (x A) B``, of which A and B are trained.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    Args:
      rank: columns of A and rows of B; no axis needs to divide it.
      alpha: numerator of the scale.
      dropout: probability that a number of x is zero where A multiplies it; in training only.
      rslora: whether the scale is alpha / sqrt(rank), not alpha / rank: Kalajdzievski, "A Rank
        Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

    Raises:
      ValueError: for a rank or alpha that is not positive, or a dropout that is no probability
        below 1.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora.rank={self.rank!r}: expected a whole number of at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha!r}: expected a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout!r}: expected at least 0 and less than 1")

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The parameters of an adapter in one call of its layer.

    Attributes:
      a: [K, r], or this device's rows of it.
      b: [r, *N], or this device's columns of it.
      key: the random key of its dropout; None for none.
      lora: its configuration.
    """

    a: Any
    b: Any
    key: Any
    lora: Lora = field(metadata={"static": True})

    def specs(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> Adapter:
        """The specs of the parameters."""
        return Adapter(P(*a), P(*b), None if self.key is None else P(), self.lora)

    def columns(self, x: jax.Array, axis_name: str) -> jax.Array:
        """``scale * dropout(x) @ A``: [..., K] -> [..., r]; of this device's tokens or features."""
        if self.key is not None:
            key = jax.random.fold_in(self.key, lax.axis_index(axis_name))
            kept = jax.random.bernoulli(key, 1 - self.lora.dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.lora.dropout), jnp.zeros_like(x))
        # Typed first, so that a sum of its gradient over devices is in the parameter's dtype.
        a = vary_over(self.a, varying_axes(x))
        return jnp.tensordot(x, a.astype(x.dtype), 1) * jnp.asarray(self.lora.scale, x.dtype)
