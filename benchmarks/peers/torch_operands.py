"""Random arrays of a case, every device's shards known to all, and the float32 reference."""

# PyTorch is no dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.torch_layers import gelu


@dataclass(frozen=True)
class Case:
    """As `benchmarks.stack.StackCase` describes it; sizes are global."""

    direction: str
    layers: int
    shape: str
    rows: int
    features: int
    hidden_features: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.direction}"


@dataclass(frozen=True)
class Place:
    """One process of several."""

    rank: int
    devices: int
    device: torch.device


class Operands:
    """Shards of standard normal rows, and of weights whose products keep that scale."""

    def __init__(self, case: Case, place: Place, dtype: torch.dtype, seed: int):
        self.case, self.place, self.dtype, self.seed = case, place, dtype, seed

    def state(self, rank: int) -> Tensor:
        return self._normal(0, rank, self.case.rows // self.place.devices, self.case.features)

    def cotangent(self, rank: int) -> Tensor:
        return self._normal(1, rank, self.case.rows // self.place.devices, self.case.features)

    def weights(self, layer: int, rank: int) -> tuple[Tensor, Tensor]:
        k, f = self.case.features, self.case.hidden_features
        up = self._normal(2 + 2 * layer, rank, f // self.place.devices, k) * k**-0.5
        down = self._normal(3 + 2 * layer, rank, k, f // self.place.devices) * f**-0.5
        return up, down

    def arguments(self, layers: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
        """This device's state, weights, and cotangent if there is to be a backward."""
        rank = self.place.rank
        weights = [self.weights(layer, rank) for layer in range(layers)]
        forward = self.case.direction == "forward"
        return self.state(rank), weights, None if forward else self.cotangent(rank)

    def _normal(self, number: int, rank: int, *size: int) -> Tensor:
        generator = torch.Generator(self.place.device)
        generator.manual_seed((self.seed * 1000 + number) * 1000 + rank)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.place.device)

    def reference(self, layers: int) -> list[Tensor]:
        """What this device must compute, from the whole arrays in float32."""
        ranks = range(self.place.devices)
        whole: list[tuple[Tensor, Tensor]] = []
        for layer in range(layers):
            ups, downs = zip(*(self.weights(layer, rank) for rank in ranks), strict=True)
            whole.append((torch.cat(ups).float(), torch.cat(downs, dim=1).float()))
        if self.case.direction == "forward":
            return [_unsharded(self.state(self.place.rank).float(), whole)]
        leaves = [w.requires_grad_() for pair in whole for w in pair]
        mine: list[Tensor] = []
        # Rows depend on no other rows: device by device, less is held at a time.
        for rank in ranks:
            state = self.state(rank).float().requires_grad_()
            result = _unsharded(state, whole)
            result.backward(self.cotangent(rank).float())
            if rank == self.place.rank:
                assert state.grad is not None
                mine = [result.detach(), state.grad]
        return [*mine, *(self._my_shard(w, i % 2) for i, w in enumerate(leaves))]

    def _my_shard(self, w: Tensor, dimension: int) -> Tensor:
        assert w.grad is not None
        return w.grad.chunk(self.place.devices, dim=dimension)[self.place.rank]


def _unsharded(state: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
    for up, down in weights:
        state = state + gelu(state @ up.t()) @ down.t()
    return state


def relative_error(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest over the arrays, each by its Euclidean norm."""
    pairs = zip(values, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
