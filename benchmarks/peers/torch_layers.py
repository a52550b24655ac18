"""Feed-forward layers under tensor and sequence parallelism, the two ways PyTorch offers.

Legend: D devices, M rows, K features, F hidden features; all shapes are of one device.

    x, state  [M/D, K]    a shard of the rows
    up        [F/D, K]    weights are [out, in], as torch.nn.Linear keeps them
    down      [K, F/D]

A communication has two operators, of a matrix w that may be transposed:

    all_gather_matmul(x, w, keep)  x [M/D, K], w [K, N] -> product [M, N], gathered [M, K] if `keep`
    matmul_reduce_scatter(x, w)    x [M, K], w [K, N] -> [M/D, N], and a function that waits for it
"""

# PyTorch is no dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Wait = Callable[[], Any]


class Communication(Protocol):
    """See the module."""

    def all_gather_matmul(
        self, x: Tensor, w: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor | None]: ...

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor) -> tuple[Tensor, Wait]: ...


class Collectives:
    """One collective and one matmul.

    With `overlap`, a reduce-scatter runs beside whatever follows until it is waited for: in the
    backward that is the weight's gradient.
    """

    def __init__(self, *, overlap: bool = False):
        self.overlap = overlap

    def all_gather_matmul(self, x, w, keep):
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered @ w, gathered if keep else None

    def matmul_reduce_scatter(self, x, w):
        product = x @ w
        scattered = product.new_empty(product.shape[0] // dist.get_world_size(), product.shape[1])
        work = dist.reduce_scatter_tensor(scattered, product, async_op=self.overlap)
        return scattered, work.wait if self.overlap and work is not None else _nothing


class AsyncTensorParallel:
    """The fused operators of PyTorch's async tensor parallelism.

    Raises:
      RuntimeError: if PyTorch would use NVLink multicast.
    """

    def __init__(self, device: torch.device):
        from torch.distributed import _symmetric_memory

        if _has_multicast(device):
            raise RuntimeError(
                "PyTorch would use NVLink multicast; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
            )
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD.group_name
        with warnings.catch_warnings():
            # Older versions need it, newer ones say that they no longer do.
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(self.group)

    def all_gather_matmul(self, x, w, keep):
        gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [w], 0, self.group, return_A=keep
        )
        return product, gathered

    def matmul_reduce_scatter(self, x, w):
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(x.contiguous(), w, "sum", 0, self.group), _nothing


def _has_multicast(device: torch.device) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return device.type == "cuda" and _SymmetricMemory.has_multicast_support(
        DeviceType.CUDA, device.index
    )


def _nothing() -> None:
    """There is nothing to wait for."""


class ColumnParallel(torch.autograd.Function):
    """x [M/D, K], w [N, K] -> [M, N]; what was gathered stays for the weight's gradient."""

    @staticmethod
    def forward(ctx, communication: Communication, x: Tensor, w: Tensor) -> Tensor:
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
    def forward(ctx, communication: Communication, x: Tensor, w: Tensor) -> Tensor:
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


def feed_forward(communication: Communication, state: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One layer: all-gather → matmul → gelu → matmul → reduce-scatter, added to the state."""
    hidden = ColumnParallel.apply(communication, state, up)
    return state + RowParallel.apply(communication, gelu(hidden), down)


def gelu(x: Tensor) -> Tensor:
    # JAX's default.
    return F.gelu(x, approximate="tanh")


def run_stack(
    layer: Callable[..., Tensor],
    communication: Communication,
    state: Tensor,
    weights: Sequence[tuple[Tensor, Tensor]],
    cotangent: Tensor | None,
) -> list[Tensor]:
    """The result; given a cotangent, also the gradients of the state and of every weight."""
    if cotangent is None:
        with torch.no_grad():
            return [_through(layer, communication, state, weights)]
    leaves = [state, *(w for layer_weights in weights for w in layer_weights)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    pairs = list(zip(leaves[1::2], leaves[2::2], strict=True))
    result = _through(layer, communication, leaves[0], pairs)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent)]


def _through(layer, communication, state, weights):
    for up, down in weights:
        state = layer(communication, state, up, down)
    return state
