"""`TritonGrouped`: grouped matmuls by kernels of this library, which read rows by index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp

from collective_matmul.dispatch.contract import Configuration, Prediction
from collective_matmul.hardware import rates, traced_device
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.grouped import Conversion, GroupedOperand
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.measured import nearest
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.grouped.triton_kernels import (
    Blocks,
    copy_rows,
    grouped_matmuls,
    grouped_outer,
    map_rows,
    sum_rows,
)
from collective_matmul.ops.experts.grouped.xla import conversion_seconds, kernel_seconds

#: The share of a matmul's rate that the kernels reach where nothing alike was measured.
_SHARE, _GRADIENT_SHARE = 0.8, 0.72
_ERROR = 0.3
#: Offsets are 32-bit numbers: arrays have fewer elements than this.
TRITON_ELEMENTS = 2**31

#: Weight gradients with at least this many columns read copies of rows, not rows by index. On one
#: H100 a step with copies takes 0.72 to 0.83 of the time; the copies cost as much as that gains at
#: some 2,500 columns.
_COLUMNS_WORTH_A_COPY = 3072

#: Rows of each group up to which a product takes the time to read its matrices.
_FEW_ROWS = 16
#: Programs that read matrices at once: about one for each multiprocessor.
_READERS = 128

#: Blocks of float32, and of weight gradients in half precision: rows that follow each other, or
#: that come by index.
_OF_FLOAT32 = Blocks(rows=64, columns=64, contracted=32, warps=4, stages=2)
_FOLLOWING, _INDEXED = Blocks(columns=256, stages=3), Blocks(warps=4, stages=4)


class TritonGrouped(GroupedBackend):
    """Pallas kernels for Triton. The devices are NVIDIA GPUs; elsewhere they are interpreted."""

    name = "triton"

    def __init__(self, blocks: Blocks | None = None):
        self._blocks = blocks

    def matmul(
        self,
        request: GroupedRequest,
        pairs: Sequence[tuple[jax.Array, jax.Array]],
        sizes: jax.Array,
        index: jax.Array | None = None,
        columns: tuple[int, int] | None = None,
    ) -> jax.Array:
        """One kernel, which adds all pairs in the same registers; see `GroupedBackend`."""
        (result,) = grouped_matmuls(
            [pairs],
            sizes,
            self.blocks(request),
            index=index,
            transposed=request.transposed,
            columns=columns,
            dtype=pairs[0][0].dtype,
            interpret=not on_gpu(),
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
        return grouped_matmuls(
            [[(x, w)] for w in ws],
            sizes,
            self.blocks(request),
            index=index,
            transposed=request.transposed,
            dtype=x.dtype,
            interpret=not on_gpu(),
        )

    def weight_gradient(
        self,
        request: GroupedRequest,
        parts: Sequence[OuterPart],
        added_to: jax.Array | None = None,
    ) -> jax.Array:
        """One kernel, which adds all parts in the same registers; see `GroupedBackend`."""
        return grouped_outer(
            parts,
            self._blocks or _gradient_blocks(parts),
            added_to=added_to,
            dtype=parts[0].left.dtype,
            interpret=not on_gpu(),
        )

    def contracted_rows(
        self, request: GroupedRequest, x: jax.Array, index: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """A copy of the rows if the matrix is wide: a step whose rows come by index is slower."""
        if request.columns < _COLUMNS_WORTH_A_COPY:
            return x, index
        return copy_rows(x, index, count, interpret=not on_gpu()), None

    def sum_rows(
        self,
        rows: jax.Array,
        places: jax.Array,
        count: jax.Array,
        weights: jax.Array | None,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """One kernel; see `GroupedBackend`."""
        return sum_rows(rows, places, count, weights, dtype, interpret=not on_gpu())

    def map_rows(
        self,
        fun: Callable[..., tuple[Sequence[jax.Array], jax.Array | None]],
        arrays: Sequence[jax.Array],
        row_values: Sequence[jax.Array],
        count: jax.Array,
        *,
        results: int,
        row_sums: bool = False,
        conversion: Conversion | None = None,
    ) -> tuple[GroupedOperand, ...]:
        """One kernel, of the rows that are used; see `GroupedBackend`."""
        return map_rows(
            fun,
            arrays,
            row_values,
            count,
            results=results,
            row_sums=row_sums,
            conversion=conversion,
            interpret=not on_gpu(),
        )

    def blocks(self, request: GroupedRequest) -> Blocks:
        """The sizes of blocks for a request."""
        return self._blocks or self.configurations(request)[0]

    def unsupported_reason(self, request: GroupedRequest) -> str | None:
        """Offsets are 32-bit numbers, and tensor cores multiply numbers of at most 32 bits."""
        if jnp.dtype(request.dtype).itemsize > 4:
            return f"its kernels multiply no {jnp.dtype(request.dtype).name}"
        elements = max(
            request.groups * request.contracted * request.columns,
            request.all_rows * max(request.contracted, request.columns),
        )
        if elements >= TRITON_ELEMENTS:
            return f"an operand has {elements} elements, and its kernels address fewer than 2**31"
        return None

    def predict(self, request: GroupedRequest) -> Prediction | None:
        """From the rate that its kernels reached at the product most like it."""
        gpu, measured = rates(), nearest(replace(request, format=PLAIN), self.name)
        if gpu is None:
            return None
        share = _GRADIENT_SHARE if request.op == "grouped_weight_gradient" else _SHARE
        share = share if measured is None else measured.share(self.name)
        width = jnp.dtype(request.dtype).itemsize / 2
        seconds = kernel_seconds(request, share) * width + conversion_seconds(request)
        return Prediction(seconds, _ERROR, gpu.basis)

    def configurations(self, request: GroupedRequest) -> Sequence[Blocks]:
        """Sizes of blocks, the likeliest to be fastest first."""
        if jnp.dtype(request.dtype).itemsize == 4:
            return [_OF_FLOAT32]
        per_group = request.used_rows / request.groups
        if request.op == "grouped_weight_gradient":
            return [_INDEXED, replace(_INDEXED, stages=3), _FOLLOWING]
        rows = next((size for size in (16, 32, 64) if per_group <= size), 128)
        columns = 256 if request.columns >= 256 else 128
        wide = Blocks(rows=rows, columns=columns, stages=4)
        if per_group <= _FEW_ROWS:
            return _reading_blocks(request, rows)
        others = [
            replace(wide, rows_at_once=at_once, stages=stages)
            for at_once, stages in itertools.product((4, 8, 16), (3, 4))
        ]
        narrow = replace(wide, columns=128, stages=4)
        return list(dict.fromkeys((wide, *others, narrow)))

    def configured(self, configuration: Configuration) -> Self:
        """This backend with fixed blocks."""
        assert isinstance(configuration, Blocks)
        return type(self)(configuration)


def _reading_blocks(request: GroupedRequest, rows: int) -> list[Blocks]:
    """Blocks for few rows in each group, whose time is that of reading matrices.

    All multiprocessors read, even if few groups have rows, as those of one token.
    """
    used = min(request.groups, request.used_rows)
    widths = (128, 64, 32)
    is_enough = (used * (request.columns // width) >= _READERS for width in widths)
    first = next((w for w, enough in zip(widths, is_enough, strict=True) if enough), widths[-1])
    ordered = [first, *(width for width in widths if width != first)]
    return [Blocks(rows, columns, contracted=128, warps=4, stages=4) for columns in ordered]


def _gradient_blocks(parts: Sequence[OuterPart]) -> Blocks:
    """The sizes of blocks for a weight gradient: how its rows are read decides."""
    if jnp.dtype(parts[0].left.dtype).itemsize == 4:
        return _OF_FLOAT32
    indexed = any(p.left_index is not None or p.right_index is not None for p in parts)
    return _INDEXED if indexed else _FOLLOWING


def on_gpu() -> bool:
    """Whether the program is for NVIDIA GPUs, for which kernels are compiled."""
    return traced_device().platform in ("gpu", "cuda")
