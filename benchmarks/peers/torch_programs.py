"""What a case asks of one device: random arrays, what is done with them, and what must come out."""

# PyTorch is no dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.torch_communication import Communication


@dataclass(frozen=True)
class Case:
    """What all cases have; sizes are global."""

    name: str
    shape: str
    layers: int
    rows: int
    features: int
    hidden_features: int


@dataclass(frozen=True)
class Place:
    """One process of several."""

    rank: int
    devices: int
    device: torch.device


class Program(ABC):
    """One device's part of a case. Every device can draw the shards of all.

    Attributes:
      case: whose part it is.
      part: a layer, or an op, of a communication and arrays.
      overlaps: whether anything may run beside a reduce-scatter.
    """

    part: Callable[..., Tensor]
    overlaps = False

    def __init__(self, case: Case, place: Place, dtype: torch.dtype, seed: int):
        self.case: Any = case
        self.place, self.dtype, self.seed = place, dtype, seed

    @abstractmethod
    def arguments(self, layers: int) -> tuple[Any, ...]:
        """This device's arrays, for so many layers."""

    @abstractmethod
    def run(
        self, part: Callable[..., Tensor], communication: Communication, *arguments: Any
    ) -> list[Tensor]:
        """All that comes out, with `part` as it is or compiled."""

    @abstractmethod
    def reference(self, layers: int) -> list[Tensor]:
        """What `run` must give on this device, from the whole arrays in float32."""

    def normal(self, number: int, rank: int, *size: int) -> Tensor:
        """Standard normal: a device's shard of one of the case's arrays."""
        generator = torch.Generator(self.place.device)
        generator.manual_seed((self.seed * 1000 + number) * 1000 + rank)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.place.device)


def relative_error(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest over the arrays, each by its Euclidean norm."""
    pairs = zip(values, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
