"""Single ops, one after another on the same rows, each with its own weight.

Legend: D devices, M rows, K features, F hidden features; all shapes are of one device.

                           x           w          result
    all_gather_matmul      [M/D, K]    [F/D, K]   [M, F/D]
    matmul_reduce_scatter  [M, F/D]    [K, F/D]   [M/D, K]
    matmul_all_reduce      [M, F/D]    [K, F/D]   [M, K]

Weights are [out, in], as in torch.nn.Linear.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.pytorch.torch_communication import TorchCommunication
from benchmarks.pytorch.torch_programs import TorchProgram


def all_gather_matmul(communication: TorchCommunication, x: Tensor, w: Tensor) -> Tensor:
    return communication.all_gather_matmul(x, w.t(), False)[0]


def matmul_reduce_scatter(communication: TorchCommunication, x: Tensor, w: Tensor) -> Tensor:
    y, wait = communication.matmul_reduce_scatter(x, w.t())
    wait()
    return y


def matmul_all_reduce(communication: TorchCommunication, x: Tensor, w: Tensor) -> Tensor:
    return communication.matmul_all_reduce(x, w.t())


OPS = {op.__name__: op for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)}


class TorchOps(TorchProgram):
    """One op over and over: the next starts when the last has ended."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.op = OPS[self.case.op]
        self.gathers = self.case.op == "all_gather_matmul"

    def x(self, rank: int) -> Tensor:
        rows, devices = self.case.rows, self.place.devices
        if self.gathers:
            return self.normal(0, rank, rows // devices, self.case.features)
        return self.normal(0, rank, rows, self.case.hidden_features // devices)

    def weight(self, layer: int, rank: int) -> Tensor:
        """A weight scaled so that products keep their scale."""
        k, f = self.case.features, self.case.hidden_features
        shard = f // self.place.devices
        size, contracted = ((shard, k), k) if self.gathers else ((k, shard), f)
        return self.normal(1 + layer, rank, *size, scale=contracted**-0.5)

    def arguments(self, layers: int) -> tuple[Tensor, list[Tensor]]:
        rank = self.place.rank
        return self.x(rank), [self.weight(layer, rank) for layer in range(layers)]

    def run(
        self, communication: TorchCommunication, x: Tensor, weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """The result with each weight."""
        with torch.no_grad():
            return [self.op(communication, x, w) for w in weights]

    def reference(self, layers: int) -> list[Tensor]:
        return [self._expected(layer) for layer in range(layers)]

    def _expected(self, layer: int) -> Tensor:
        rank, devices = self.place.rank, self.place.devices
        if self.gathers:
            whole = torch.cat([self.x(other) for other in range(devices)])
            return whole.float() @ self.weight(layer, rank).float().t()
        sums = [
            self.x(other).float() @ self.weight(layer, other).float().t()
            for other in range(devices)
        ]
        total = torch.stack(sums).sum(0)
        return total if self.case.op == "matmul_all_reduce" else total.chunk(devices)[rank]
