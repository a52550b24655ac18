"""`XlaGrouped`, the reference: `jax.lax.ragged_dot`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import assumed_rates, rates
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.operands.arithmetic import accumulator, add
from collective_matmul.operands.format import PLAIN
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.request import GroupedRequest

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
_TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)

#: XLA multiplies all rows by the matrices of all groups, at this share of the rate of a matmul.
#: Measured on one H100: 30 ms where a grouped kernel took 5.8.
_SLOWDOWN = 5.0


class XlaGrouped(GroupedBackend):
    """`jax.lax.ragged_dot`, which runs everywhere."""

    name = "xla"

    def matmul(
        self,
        request: GroupedRequest,
        pairs: Sequence[tuple[jax.Array, jax.Array]],
        sizes: jax.Array,
        index: jax.Array | None = None,
        columns: tuple[int, int] | None = None,
    ) -> jax.Array:
        """Copies the rows if they are read by index; see `GroupedBackend`."""
        dtype = pairs[0][0].dtype
        products = []
        for x, w in pairs:
            rows = taken_rows(x, index)
            if columns is not None:
                w = lax.slice_in_dim(w, *columns, axis=1 if request.transposed else 2)
            if request.transposed:
                wide = lax.ragged_dot_general(
                    rows, w, sizes, _TRANSPOSED, preferred_element_type=accumulator(dtype)
                )
            else:
                wide = lax.ragged_dot(rows, w, sizes, preferred_element_type=accumulator(dtype))
            products.append(wide)
        return add(*products, dtype=dtype)

    def weight_gradient(
        self,
        request: GroupedRequest,
        parts: Sequence[OuterPart],
        added_to: jax.Array | None = None,
    ) -> jax.Array:
        """Copies the rows that are read by index; see `GroupedBackend`."""
        del request
        dtype = parts[0].left.dtype
        products = [
            lax.ragged_dot_general(
                taken_rows(part.left, part.left_index),
                taken_rows(part.right, part.right_index),
                part.sizes,
                _OVER_ROWS,
                preferred_element_type=accumulator(dtype),
            )
            for part in parts
        ]
        return add(*products, *([] if added_to is None else [added_to]), dtype=dtype)

    def unsupported_reason(self, request: GroupedRequest) -> str | None:
        """None: it executes every request."""
        del request

    def predict(self, request: GroupedRequest) -> Prediction | None:
        """A multiple of a matmul's time on GPUs, or the time to read the matrices of all groups."""
        gpu = rates()
        if gpu is None:
            return None
        computing = request.flops / gpu.sustained_flops * _SLOWDOWN
        # Rows are written, and read again, once for each group.
        copies = 2 * request.all_rows * request.contracted * request.groups
        matrices = request.groups * request.contracted * request.columns
        numbers = request.pairs * (matrices + copies)
        reading = numbers * np.dtype(request.dtype).itemsize / gpu.operand_bytes
        seconds = max(computing, reading) + conversion_seconds(request)
        return Prediction(gpu.kernel_seconds + seconds, 0.0, gpu.basis)


def taken_rows(x: jax.Array, index: jax.Array | None) -> jax.Array:
    """The rows of x by index; x as it is without one."""
    return x if index is None else jnp.take(x, index, axis=0, mode="clip")


def conversion_seconds(request: GroupedRequest) -> float:
    """Predicted seconds of the passes in which operands in a format become arrays."""
    if request.format == PLAIN:
        return 0.0
    numbers = request.all_rows * request.contracted
    if request.op == "grouped_matmul":
        numbers += request.groups * request.contracted * request.columns
    itemsize = np.dtype(request.dtype).itemsize
    return request.pairs * numbers * (1 + itemsize) / assumed_rates().pass_bytes


def kernel_seconds(request: GroupedRequest, share: float) -> float:
    """Predicted seconds of a kernel that reaches this share of the sustained rate.

    It reads a matrix once for the rows of its group, and not at all if there are none.
    """
    gpu, groups = assumed_rates(), request.groups
    if request.op == "grouped_matmul":
        # Expected, if rows choose their groups independently.
        groups *= 1 - (1 - 1 / groups) ** request.used_rows
    matrices = groups * request.contracted * request.columns * request.pairs
    moved = (matrices + request.used_rows * (request.contracted + request.columns)) * 2
    busy = max(request.flops / (share * gpu.sustained_flops), moved / gpu.operand_bytes)
    return gpu.kernel_seconds + busy
