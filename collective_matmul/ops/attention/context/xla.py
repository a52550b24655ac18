"""`XlaContext`, the reference: all-gathers of keys and values, and masks made of positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import axis_index, psum_scatter
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.ops.attention.choice import REFERENCE
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.local.alone import attend_alone, gradients_alone
from collective_matmul.ops.attention.context.local.masked import (
    Tokens,
    attend_by_positions,
    gradients_by_positions,
)
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients


class XlaContext(ContextBackend):
    """XLA's collectives and matmuls, one after the other: every request."""

    name = "xla"

    def forward(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array]:
        """See `ContextBackend`."""
        if request.axis_size == 1:
            return attend_alone(request, operands)
        key, value, queries, keys = self._gathered(request, operands)
        return attend_by_positions(request, operands.query, key, value, queries, keys)

    def backward(
        self,
        request: ContextRequest,
        operands: SequenceShard,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
    ) -> Gradients:
        """See `ContextBackend`. Sums over devices travel in float32."""
        if request.axis_size == 1:
            return gradients_alone(request, operands, out, log_sum_exp, cotangent)
        key, value, queries, keys = self._gathered(request, operands)
        dquery, dkey, dvalue = gradients_by_positions(
            request, operands.query, key, value, queries, keys, out, log_sum_exp, cotangent
        )
        return dquery, self._sum(request, dkey), self._sum(request, dvalue)

    def _gathered(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array, Tokens, Tokens]:
        """Keys and values in the order of the devices; and where queries and keys are."""
        both = jnp.stack([operands.key, operands.value])
        key, value = lax.all_gather(both, request.axis_name, axis=2, tiled=True)
        ids = operands.ids
        if ids is not None:
            ids = lax.all_gather(ids, request.axis_name, axis=1, tiled=True)
        device = axis_index(request.axis_name)
        queries = Tokens(request.chunks.positions(device), operands.ids)
        return key, value, queries, Tokens(jnp.asarray(request.chunks.order), ids)

    def _sum(self, request: ContextRequest, whole: jax.Array) -> jax.Array:
        wide = whole.astype(accumulator(whole.dtype))
        return psum_scatter(wide, request.axis_name, 1).astype(whole.dtype)

    def unsupported_reason(self, request: ContextRequest) -> str | None:
        """None: it executes every request."""
        del request

    def predict(self, request: ContextRequest) -> Prediction | None:
        """The computation and the collectives, one after the other."""
        gpu = rates()
        if gpu is None:
            return None
        return Prediction(context_cost.xla_seconds(request), 0.0, gpu.basis)

    def unprofitable_reason(self, request: ContextRequest) -> str | None:
        """The reason where the machine has a kernel that stores no scores in memory."""
        name = context_cost.kernel_name(request)
        return None if name == REFERENCE else f"would have all scores in memory, unlike {name}"
