"""Fences inside kernels that Pallas does not offer."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import nvvm

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


@plgpu.inline_mgpu()
def wgmma_fence(_: Any) -> None:
    """Orders the accumulator's registers before a wgmma.

    Without this ptxas adds fences itself. Where it cannot prove that all lanes arrive together, it
    makes each wgmma wait for the one before.
    """
    nvvm.wgmma_fence_aligned()
