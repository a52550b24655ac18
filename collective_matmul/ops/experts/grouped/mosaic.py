"""`MosaicGrouped`: grouped matmuls by this library's kernels for Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import MULTIPLIES_MIXED_FP8, partly_automatic
from collective_matmul.dispatch.contract import Configuration, Prediction
from collective_matmul.hardware import rates
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.grouped_matmul.gradient_kernel import fills
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import (
    GroupScales,
    OuterPart,
    grouped_matmuls,
    grouped_outer,
)
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK, can_scale
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    ROW_MULTIPLE,
    SHARED_MEMORY_BYTES,
    Tiling,
)
from collective_matmul.operands.arithmetic import add
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.grouped import Conversion, GroupedOperand, as_array
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.measured import nearest
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.grouped.triton import TRITON_ELEMENTS, on_gpu
from collective_matmul.ops.experts.grouped.triton_kernels import copy_rows, map_rows, sum_rows
from collective_matmul.ops.experts.grouped.xla import (
    conversion_seconds,
    kernel_seconds,
    taken_rows,
)

#: K and N are multiples of this: the width of a swizzled tile in shared memory.
_WIDTH_MULTIPLE = 64
#: Rows of each group up to which tiles of 64 rows waste least.
_FEW_ROWS = 64
#: Weight gradients with at least this many columns read copies of rows, not rows by index. On one
#: H100 that takes 0.78 of the time for 14,336 columns; for 2,048 it gains what the copies cost.
_COLUMNS_WORTH_A_COPY = 2048
#: The error of a prediction: requests differ from what was measured.
_ERROR = 0.3


class MosaicGrouped(GroupedBackend):
    """Pallas kernels for Mosaic GPU, which read rows by index and add pairs in registers.

    What was measured of products like a request predicts its time, and has its tiling.
    """

    name = "mosaic"

    def __init__(self, tiling: Tiling | None = None):
        self._tiling = tiling

    def operand(self, request: GroupedRequest, stored: GroupedOperand) -> GroupedOperand:
        """Leaves operands that are multiplied in 8 bits as they are; see `GroupedBackend`."""
        if _in_8_bits(request):
            return stored
        return as_array(stored, request.dtype)

    def multiplied_dtypes(self, request: GroupedRequest) -> tuple[str, str] | None:
        """The dtypes of what `operand` returns."""
        if _in_8_bits(request):
            return _format_dtypes(request)
        return super().multiplied_dtypes(request)

    def matmul(
        self,
        request: GroupedRequest,
        pairs: Sequence[tuple[GroupedOperand, GroupedOperand]],
        sizes: jax.Array,
        index: jax.Array | None = None,
        columns: tuple[int, int] | None = None,
    ) -> jax.Array:
        """One kernel, which adds all pairs in the same registers; see `GroupedBackend`."""
        if columns is not None and not _is_block(columns, request):
            return lax.slice_in_dim(self.matmul(request, pairs, sizes, index), *columns, axis=1)
        xs, ws = zip(*pairs, strict=True)
        (result,) = self._products(request, xs, [[w] for w in ws], sizes, index, columns)
        return result

    def matmuls(
        self,
        request: GroupedRequest,
        x: GroupedOperand,
        ws: Sequence[GroupedOperand],
        sizes: jax.Array,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """One kernel; see `GroupedBackend`."""
        return self._products(request, [x], [list(ws)], sizes, index)

    def _products(
        self,
        request: GroupedRequest,
        xs: Sequence[GroupedOperand],
        ws: Sequence[Sequence[GroupedOperand]],
        sizes: jax.Array,
        index: jax.Array | None,
        columns: tuple[int, int] | None = None,
    ) -> tuple[jax.Array, ...]:
        """One kernel: see `grouped_matmuls`."""
        options: dict[str, Any] = {"transposed": request.transposed}
        if _in_8_bits(request):
            scales = _scales(xs, ws, index, columns)
            options = {"transposed": True, "scales": scales, "dtype": request.dtype}
            xs = [x.loaded for x in xs]
            ws = [[w.values for w in term] for term in ws]
        tiling, target = self.tiling(request), _target()
        return grouped_matmuls(
            xs, ws, sizes, tiling, target, index=index, columns=columns, **options
        )

    def weight_gradient(
        self,
        request: GroupedRequest,
        parts: Sequence[OuterPart],
        added_to: jax.Array | None = None,
    ) -> jax.Array:
        """One kernel, which adds all parts in the same registers; see `GroupedBackend`."""
        tiling, target, alike = self.tiling(request), _target(), _alike(parts)
        if added_to is None or fills(tiling, request.contracted, request.columns):
            return grouped_outer(alike, tiling, target, added_to)
        product = grouped_outer(alike, tiling, target)
        return add(product, added_to, dtype=product.dtype)

    def contracted_rows(
        self, request: GroupedRequest, x: jax.Array, index: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """A copy of the rows if the matrix is wide: TMA then loads them."""
        size = max(x.size, index.size * request.contracted)
        is_worth_it = request.columns >= _COLUMNS_WORTH_A_COPY and _has_triton(size)
        return (copy_rows(x, index, count), None) if is_worth_it else (x, index)

    def sum_rows(
        self,
        rows: jax.Array,
        places: jax.Array,
        count: jax.Array,
        weights: jax.Array | None,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """A kernel for Triton; see `GroupedBackend`."""
        if not _has_triton(rows.size):
            return super().sum_rows(rows, places, count, weights, dtype)
        return sum_rows(rows, places, count, weights, dtype)

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
        """By a kernel for Triton, of the rows that are used; see `GroupedBackend`."""
        options: dict[str, Any] = {
            "results": results,
            "row_sums": row_sums,
            "conversion": conversion,
        }
        if not _has_triton(arrays[0].size):
            return super().map_rows(fun, arrays, row_values, count, **options)
        return map_rows(fun, arrays, row_values, count, **options)

    def tiling(self, request: GroupedRequest) -> Tiling:
        """The tiling for a request: of the product most like it that was measured, if it fits."""
        if self._tiling is not None:
            return self._tiling
        tilings, measured = self.configurations(request), nearest(_multiplied(request), self.name)
        if measured is None or _has_few_rows(request) or measured.tiling not in tilings:
            return tilings[0]
        return measured.tiling

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
        """From the rate of the product most like it that was measured; None for few rows."""
        gpu, measured = rates(), nearest(_multiplied(request), self.name)
        if gpu is None or measured is None or _has_few_rows(request):
            return None
        if self.unsupported_reason(request) is not None:
            return None
        seconds = kernel_seconds(request, measured.share(self.name))
        if not _in_8_bits(request):
            seconds += conversion_seconds(request)
        return Prediction(seconds, _ERROR, gpu.basis)

    def configurations(self, request: GroupedRequest) -> Sequence[Tiling]:
        """Tilings, the likeliest to be fastest first."""
        wide = Tiling(cluster_dimension=None)
        if _in_8_bits(request):
            return _scaled_tilings(request)
        tilings = [
            wide,
            replace(wide, cluster_dimension="m"),
            replace(wide, grid_minor_dim="n"),
            replace(wide, grid_tile_width=4),
            replace(wide, tile_n=128, max_concurrent_steps=6),
        ]
        if request.op == "grouped_matmul":
            few = replace(
                wide, tile_m=64, wg_dimension="n", max_concurrent_steps=5, epilogue_stages=1
            )
            tilings.insert(0 if _has_few_rows(request) else len(tilings), few)
        return [t for t in tilings if t.shared_memory_bytes <= SHARED_MEMORY_BYTES]

    def configured(self, configuration: Configuration) -> Self:
        """This backend with a fixed tiling."""
        assert isinstance(configuration, Tiling)
        return type(self)(configuration)


def _has_triton(elements: int) -> bool:
    """Whether kernels for Triton can take arrays of so many elements here."""
    return on_gpu() and elements < TRITON_ELEMENTS


def _target() -> Target:
    target = device.target()
    assert target is not None
    return target


def _multiplied(request: GroupedRequest) -> GroupedRequest:
    """The request, of arrays where operands in a format become arrays."""
    return request if _in_8_bits(request) else replace(request, format=PLAIN)


def _has_few_rows(request: GroupedRequest) -> bool:
    return request.used_rows <= _FEW_ROWS * request.groups


def _in_8_bits(request: GroupedRequest) -> bool:
    """Whether a product is multiplied in its format; else operands become arrays."""
    if request.op != "grouped_matmul" or request.format.scaled_parts is None:
        return False
    x, w = _format_dtypes(request)
    # Behind the last k-block of a row there are scales, which no k-block may contain.
    return request.contracted % BLOCK == 0 and (x == w or MULTIPLIES_MIXED_FP8)


def _format_dtypes(request: GroupedRequest) -> tuple[str, str]:
    return request.format.operand_dtypes(request.dtype, backward=request.of_gradient)


def _scaled_tilings(request: GroupedRequest) -> list[Tiling]:
    """Tilings of products in 8 bits, the likeliest to be fastest first."""
    wide = Tiling(128, 256, tile_k=BLOCK, max_concurrent_steps=4, cluster_dimension=None)
    narrow = replace(wide, tile_n=BLOCK, max_concurrent_steps=5)
    few = replace(wide, tile_m=64, wg_dimension="n", epilogue_stages=1)
    tilings = [wide, narrow, replace(wide, grid_minor_dim="n"), few]
    if _has_few_rows(request):
        tilings = [few, *tilings[:-1]]
    parts = request.format.scaled_parts
    assert parts is not None
    return [tiling for tiling in tilings if can_scale(tiling, parts)]


def _scales(
    xs: Sequence[Any],
    ws: Sequence[Sequence[Any]],
    index: jax.Array | None,
    columns: tuple[int, int] | None,
) -> GroupScales:
    """The scales of packed rows and of stacks of matrices, those of some columns."""
    in_blocks = ws[0][0].in_blocks
    rows = [taken_rows(x.scales, index) for x in xs]

    def of_result(*terms: Any) -> jax.Array:
        scales = jnp.concatenate([w.scales for w in terms], 2) if in_blocks else terms[0].scales
        if columns is None:
            return scales
        first, end = (column // (BLOCK if in_blocks else 1) for column in columns)
        return lax.slice_in_dim(scales, first, end, axis=1)

    results = [of_result(*terms) for terms in zip(*ws, strict=True)]
    return GroupScales(jnp.concatenate(rows, 1) if in_blocks else rows[0], results)


def _is_block(columns: tuple[int, int], request: GroupedRequest) -> bool:
    """Whether columns are one of equal blocks that the kernel can address."""
    first, end = columns
    multiple = BLOCK if request.format.scaled_parts == "blocks" else _WIDTH_MULTIPLE
    return request.columns % (end - first) == first % (end - first) == (end - first) % multiple == 0


def _alike(parts: Sequence[OuterPart]) -> list[OuterPart]:
    """The parts; with copies of rows if they come by index otherwise than the kernel can read."""
    kinds = {(p.left_index is not None, p.right_index is not None) for p in parts}
    if len(kinds) == 1 and (True, True) not in kinds:
        return list(parts)
    return [
        OuterPart(taken_rows(p.left, p.left_index), taken_rows(p.right, p.right_index), p.sizes)
        for p in parts
    ]
