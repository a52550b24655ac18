"""`Lora`: a low-rank adapter beside a weight that does not change."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
