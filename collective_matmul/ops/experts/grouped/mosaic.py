"""`MosaicGrouped`: grouped matmuls by this library's kernels for Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import partly_automatic
from collective_matmul.dispatch.contract import Configuration, Prediction
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import (
    OuterPart,
    grouped_matmuls,
    grouped_outer,
)
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    ROW_MULTIPLE,
    SHARED_MEMORY_BYTES,
    Tiling,
)
from collective_matmul.operands.arithmetic import add
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.grouped.xla import taken_rows

#: K and N are multiples of this: the width of a swizzled tile in shared memory.
_WIDTH_MULTIPLE = 64
#: Rows of each group up to which tiles of 64 rows waste least.
_FEW_ROWS = 64


class MosaicGrouped(GroupedBackend):
    """Pallas kernels for Mosaic GPU, which read rows by index and add pairs in registers.

    No prediction: it is chosen by name, or where it was measured to be fastest.
    """

    name = "mosaic"

    def __init__(self, tiling: Tiling | None = None):
        self._tiling = tiling

    def matmul(
        self,
        request: GroupedRequest,
        pairs: Sequence[tuple[jax.Array, jax.Array]],
        sizes: jax.Array,
        index: jax.Array | None = None,
        columns: tuple[int, int] | None = None,
    ) -> jax.Array:
        """One kernel, which adds all pairs in the same registers; see `GroupedBackend`."""
        if columns is not None and (request.transposed or not _is_block(columns, request.columns)):
            return lax.slice_in_dim(self.matmul(request, pairs, sizes, index), *columns, axis=1)
        xs, ws = zip(*pairs, strict=True)
        (result,) = grouped_matmuls(
            xs,
            [[w] for w in ws],
            sizes,
            self.tiling(request),
            _target(),
            index=index,
            transposed=request.transposed,
            columns=columns,
        )
        return result

    def matmuls(
        self,
        request: GroupedRequest,
        x: jax.Array,
        ws: Sequence[jax.Array],
        sizes: jax.Array,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """One kernel; see `GroupedBackend`."""
        tiling, target = self.tiling(request), _target()
        transposed = request.transposed
        return grouped_matmuls(
            [x], [list(ws)], sizes, tiling, target, index=index, transposed=transposed
        )

    def weight_gradient(
        self,
        request: GroupedRequest,
        parts: Sequence[OuterPart],
        added_to: jax.Array | None = None,
    ) -> jax.Array:
        """One kernel, which adds all parts in the same registers; see `GroupedBackend`."""
        product = grouped_outer(_alike(parts), self.tiling(request), _target())
        return product if added_to is None else add(product, added_to, dtype=product.dtype)

    def tiling(self, request: GroupedRequest) -> Tiling:
        """The tiling for a request."""
        return self._tiling or self.configurations(request)[0]

    def unsupported_reason(self, request: GroupedRequest) -> str | None:
        """Its kernels are for Hopper GPUs, half precision, and sizes that TMA can address."""
        if device.target() is None:
            return "its kernels run on Hopper GPUs only"
        if partly_automatic():
            return "its kernels cannot be divided over automatic mesh axes; make all axes manual"
        dtype = jnp.dtype(request.dtype)
        if dtype.name not in ("bfloat16", "float16"):
            return f"its kernels multiply no {dtype.name}"
        for name, size in (("contracted size", request.contracted), ("columns", request.columns)):
            if size % _WIDTH_MULTIPLE:
                return f"{name} {size}: not a multiple of {_WIDTH_MULTIPLE}"
        if request.all_rows % ROW_MULTIPLE:
            return f"rows {request.all_rows}: not a multiple of {ROW_MULTIPLE}"
        return None

    def predict(self, request: GroupedRequest) -> Prediction | None:
        """None: it was not measured on enough shapes."""
        del request

    def configurations(self, request: GroupedRequest) -> Sequence[Tiling]:
        """Tilings, the likeliest to be fastest first."""
        wide = Tiling(cluster_dimension=None)
        tilings = [
            wide,
            replace(wide, cluster_dimension="m"),
            replace(wide, grid_minor_dim="n"),
            replace(wide, tile_m=256, tile_n=128, epilogue_stages=1),
            replace(wide, tile_n=128, max_concurrent_steps=6),
        ]
        if request.op == "grouped_matmul":
            few = replace(
                wide, tile_m=64, wg_dimension="n", max_concurrent_steps=5, epilogue_stages=1
            )
            is_few = request.used_rows <= _FEW_ROWS * request.groups
            tilings.insert(0 if is_few else len(tilings), few)
        return [t for t in tilings if t.shared_memory_bytes <= SHARED_MEMORY_BYTES]

    def configured(self, configuration: Configuration) -> Self:
        """This backend with a fixed tiling."""
        assert isinstance(configuration, Tiling)
        return type(self)(configuration)


def _target() -> Target:
    target = device.target()
    assert target is not None
    return target


def _is_block(columns: tuple[int, int], width: int) -> bool:
    """Whether columns are one of equal blocks that TMA can address."""
    first, end = columns
    size = end - first
    return width % size == first % size == size % _WIDTH_MULTIPLE == 0


def _alike(parts: Sequence[OuterPart]) -> list[OuterPart]:
    """The parts; with copies of rows if they come by index otherwise than the kernel can read."""
    kinds = {(p.left_index is not None, p.right_index is not None) for p in parts}
    if len(kinds) == 1 and (True, True) not in kinds:
        return list(parts)
    return [
        OuterPart(taken_rows(p.left, p.left_index), taken_rows(p.right, p.right_index), p.sizes)
        for p in parts
    ]
