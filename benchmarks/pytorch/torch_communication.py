"""PyTorch's two ways to communicate around a matmul.

Legend: D devices; all shapes are of one device. A communication has three operators, of a matrix w
that may be transposed:

    all_gather_matmul(x, w, keep)  x [M/D, K], w [K, N] -> product [M, N], gathered [M, K] if `keep`
    matmul_reduce_scatter(x, w)    x [M, K], w [K, N] -> [M/D, N], and a function that waits for it
    matmul_all_reduce(x, w)        x [M, K], w [K, N] -> [M, N]
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[], Any]


class Collectives:
    """One collective and one matmul.

    With `overlap`, a reduce-scatter runs beside whatever follows until it is waited for: in the
    backward that is the weight's gradient.
    """

    def __init__(self, *, overlap: bool = False):
        self.overlap = overlap

    def all_gather_matmul(self, x: Tensor, w: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered @ w, gathered if keep else None

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor) -> tuple[Tensor, Wait]:
        product = x @ w
        scattered = product.new_empty(product.shape[0] // dist.get_world_size(), product.shape[1])
        work = dist.reduce_scatter_tensor(scattered, product, async_op=self.overlap)
        return scattered, work.wait if self.overlap and work is not None else _nothing

    def matmul_all_reduce(self, x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        dist.all_reduce(product)
        return product


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

    def all_gather_matmul(self, x: Tensor, w: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [w], 0, self.group, return_A=keep
        )
        return product, gathered

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor) -> tuple[Tensor, Wait]:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(x.contiguous(), w, "sum", 0, self.group), _nothing

    def matmul_all_reduce(self, x: Tensor, w: Tensor) -> Tensor:
        raise NotImplementedError("PyTorch's async tensor parallelism has no matmul_all_reduce")


TorchCommunication = Collectives | AsyncTensorParallel


def _has_multicast(device: torch.device) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return device.type == "cuda" and _SymmetricMemory.has_multicast_support(
        DeviceType.CUDA, device.index
    )


def _nothing() -> None:
    """Waits for nothing."""
