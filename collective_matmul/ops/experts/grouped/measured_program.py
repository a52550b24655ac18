"""Measures grouped matmuls: operands of one, and one repetition of it, on one device.

Groups have equally many rows, up to one, as those of a balanced router. Rows are read by a random
index, as they are of tokens, unless several products are added: such rows are sorted already.

Operands in a format are converted before. What a backend makes of them is measured with it.

Shapes: x [M, K], y [M, N], w [G, K, N], or [G, N, K] if the request is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul.dispatch.contract import Backend
from collective_matmul.dispatch.registry import Op, register_op
from collective_matmul.dispatch.repetitions import Repetitions
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.operands.grouped import matrix_stacks, separate_rows
from collective_matmul.operands.multiply import multiplied
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.request import GroupedOp, GroupedRequest
from collective_matmul.ops.experts.grouped.xla import kernel_seconds


class GroupedOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: [M, K], one for each pair.
      order: int32 [M], the row of x for each sorted row; before `prepare`, random numbers [M].
      weights: of each repetition: w of each pair; or, for a weight gradient, y [M, N].
    """

    xs: Sequence[Any]
    order: Any
    weights: Sequence[Sequence[Any]]


class GroupedRepetitions(Repetitions):
    """A flat request, repeated, on the first of some devices."""

    prepares = True

    def __init__(self, request: GroupedRequest, devices: Sequence[Any]):
        super().__init__(request, devices, seconds=kernel_seconds(request, share=1.0))
        self.request: GroupedRequest = request

    def plain_operands(self, implementation: str) -> GroupedOperands:
        """Shapes, of the same operands for all backends."""
        del implementation
        request = self.request
        rows, k, n = request.all_rows, request.contracted, request.columns
        own = (request.groups, n, k) if request.transposed else (request.groups, k, n)
        if request.op == "grouped_weight_gradient":
            own = (rows, n)
        weights = [self._array(own, request.dtype)] * request.pairs
        return GroupedOperands(
            xs=[self._array((rows, k), request.dtype)] * request.pairs,
            order=self._array((rows,), jnp.float32),
            weights=[weights] * self.repetitions,
        )

    def prepare_shards(self, operands: GroupedOperands) -> GroupedOperands:
        """A random order from random numbers, and operands in the format of the request.

        Of a weight gradient, these are the rows of x: those of y are computed where they are used.
        """
        request = self.request
        xs = separate_rows(request.format, operands.xs, of_gradient=request.of_gradient)
        weights = operands.weights
        if request.op == "grouped_matmul":
            weights = [matrix_stacks(request.format, ws) for ws in weights]
        order = jnp.argsort(operands.order).astype(jnp.int32)
        return GroupedOperands([*map(multiplied, xs)], order, weights)

    def execute(
        self, backend: Backend, operands: GroupedOperands, weights: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The product."""
        request, found = self.request, cast(GroupedBackend, backend)
        sizes = balanced_sizes(request)
        xs = [found.operand(request, x) for x in operands.xs]
        if request.op == "grouped_weight_gradient":
            used = jnp.int32(request.used_rows)
            rows, order = found.contracted_rows(request, xs[0], operands.order, used)
            part = OuterPart(rows, weights[0], sizes, left_index=order)
            return found.weight_gradient(request, [part]), ()
        index = operands.order if request.pairs == 1 else None
        pairs = list(zip(xs, [found.operand(request, w) for w in weights], strict=True))
        return found.matmul(request, pairs, sizes, index), ()


def balanced_sizes(request: GroupedRequest) -> jax.Array:
    """int32 [G]: rows of each group, the used rows together."""
    bounds = np.arange(request.groups + 1) * request.used_rows // request.groups
    return jnp.asarray(np.diff(bounds), jnp.int32)


for _name in get_args(GroupedOp):
    register_op(Op(_name, GROUPED_BACKENDS, GroupedRequest.from_fields, GroupedRepetitions))
