"""A router and its experts in the place of a feed-forward, with the numerics of the trainer.

Experts are divided over all devices, which exchange tokens by `torch_experts.AllToAll`, as
torchtitan does.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pytorch.programs.torch_experts import AllToAll, ExpertCollectives
from benchmarks.pytorch.torch_programs import Place
from models.config import LlamaConfig


class TorchRouter(nn.Module):
    """A softmax over all experts, of which the largest are chosen."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts or 0, config.features))
        self.choices = config.num_experts_per_token or 0
        self.normalized = config.normalize_expert_weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers and the weights of the experts of tokens [T, h]: [T, k] each."""
        probabilities = F.linear(x.float(), self.weight.float()).softmax(-1)
        weights, ids = probabilities.topk(self.choices)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights


class _Cast(torch.autograd.Function):
    """Weights in another dtype. Their gradients are divided by the number of devices, since the
    loss is the mean of those of all devices."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, dtype: torch.dtype, devices: int) -> Tensor:
        ctx.dtype, ctx.devices = weights.dtype, devices
        return weights.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        result = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, 1 / ctx.devices, out=result), None, None


class TorchExpertFeedForward(nn.Module):
    """This device's experts. Their gradients are complete without a sum over devices."""

    def __init__(self, config: LlamaConfig, place: Place, dtype: torch.dtype):
        super().__init__()
        experts, h, f = (config.num_experts or 0), config.features, config.hidden_features
        self.router, self.dtype = TorchRouter(config), dtype
        self.gate = nn.Parameter(torch.empty(experts, f, h))
        self.up = nn.Parameter(torch.empty(experts, f, h))
        self.down = nn.Parameter(torch.empty(experts, h, f))
        self._place, self._experts = place, experts
        self.compile_parts(lambda function: function)

    def compile_parts(self, compiled: Callable) -> None:
        """Compiles what is between collectives and what the host reads."""
        self.exchange = AllToAll(ExpertCollectives(self._place), self._experts, compiled)
        self.route = compiled(self.router)

    def keep_own(self) -> None:
        """Leaves this device its experts, of all."""
        for name in ("gate", "up", "down"):
            own = getattr(self, name).detach().chunk(self._place.devices)[self._place.rank]
            setattr(self, name, nn.Parameter(own.clone()))

    def local_parameters(self) -> list[nn.Parameter]:
        """Parameters that other devices do not have."""
        return [self.gate, self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        cast = (self.dtype, self._place.devices)
        experts = (_Cast.apply(w, *cast) for w in self.local_parameters())
        return self.exchange(x, ids, weights, *experts)  # pyright: ignore[reportArgumentType]
