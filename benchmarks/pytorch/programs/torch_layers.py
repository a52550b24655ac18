"""Feed-forward layers under tensor and sequence parallelism, with or without their gradients.

Legend: D devices, M rows, K features, F hidden features; all shapes are of one device.

    x, state  [M/D, K]    a shard of the rows
    up        [F/D, K]    weights are [out, in], as in torch.nn.Linear
    down      [K, F/D]
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pytorch.torch_communication import TorchCommunication
from benchmarks.pytorch.torch_programs import TorchProgram, computed


class TorchLayers(TorchProgram):
    """Layer after layer, each with its own weights."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # The weight's gradient does not need what is scattered in a backward.
        self.overlaps = self.case.direction != "forward"

    def state(self, rank: int) -> Tensor:
        return self.normal(0, rank, self.case.rows // self.place.devices, self.case.features)

    def cotangent(self, rank: int) -> Tensor:
        return self.normal(1, rank, self.case.rows // self.place.devices, self.case.features)

    def weights(self, layer: int, rank: int) -> tuple[Tensor, Tensor]:
        k, f = self.case.features, self.case.hidden_features
        shard = f // self.place.devices
        up = self.normal(2 + 2 * layer, rank, shard, k, scale=k**-0.5)
        return up, self.normal(3 + 2 * layer, rank, k, shard, scale=f**-0.5)

    def arguments(self, layers: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
        """This device's state, weights, and cotangent if there is to be a backward."""
        rank = self.place.rank
        weights = [self.weights(layer, rank) for layer in range(layers)]
        forward = self.case.direction == "forward"
        return self.state(rank), weights, None if forward else self.cotangent(rank)

    def run(
        self,
        communication: TorchCommunication,
        state: Tensor,
        weights: Sequence[tuple[Tensor, Tensor]],
        cotangent: Tensor | None,
    ) -> list[Tensor]:
        """The result; given a cotangent, also the gradients of the state and of every weight."""
        leaves = [state, *(w for layer_weights in weights for w in layer_weights)]
        if cotangent is not None:
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return computed(functools.partial(_through, communication), leaves, cotangent)

    def reference(self, layers: int) -> list[Tensor]:
        """The expected result on this device, computed from the whole arrays in float32."""
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
            state = self.state(rank).float().detach().requires_grad_()
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


class ColumnParallel(torch.autograd.Function):
    """x [M/D, K], w [N, K] -> [M, N]; the gathered x is kept for the weight's gradient."""

    @staticmethod
    def forward(ctx, communication: TorchCommunication, x: Tensor, w: Tensor) -> Tensor:
        keep = any(ctx.needs_input_grad)
        product, gathered = communication.all_gather_matmul(x, w.t(), keep)
        if keep:
            assert gathered is not None
            ctx.communication = communication
            ctx.save_for_backward(gathered, w)
        return product

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (dy,) = gradients
        gathered, w = ctx.saved_tensors
        dx, wait = ctx.communication.matmul_reduce_scatter(dy, w)
        dw = dy.t() @ gathered
        wait()
        return None, dx, dw


class RowParallel(torch.autograd.Function):
    """x [M, K], w [N, K] -> [M/D, N]."""

    @staticmethod
    def forward(ctx, communication: TorchCommunication, x: Tensor, w: Tensor) -> Tensor:
        ctx.communication = communication
        ctx.save_for_backward(x, w)
        y, wait = communication.matmul_reduce_scatter(x, w.t())
        wait()
        return y

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, w = ctx.saved_tensors
        dx, dy = ctx.communication.all_gather_matmul(gradients[0], w, True)
        return None, dx, dy.t() @ x


def feed_forward(
    communication: TorchCommunication, state: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """One layer: all-gather → matmul → gelu → matmul → reduce-scatter, added to the state."""
    hidden = ColumnParallel.apply(communication, state, up)
    return state + RowParallel.apply(communication, gelu(hidden), down)


def gelu(x: Tensor) -> Tensor:
    # JAX's default.
    return F.gelu(x, approximate="tanh")


def _through(communication: TorchCommunication, state: Tensor, *weights: Tensor) -> Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        state = feed_forward(communication, state, up, down)
    return state
