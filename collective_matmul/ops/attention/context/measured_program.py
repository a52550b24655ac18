"""Measures one pass of `context_attention`: its operands, and one repetition of it.

A repetition of a backward pass gets any result and log-sum-exp: its time does not depend on them.
Segments are equally long. Local shapes are those of `ContextBackend`; global arrays concatenate the
devices' shards along the first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.contract import Backend
from collective_matmul.dispatch.registry import Op, register_op
from collective_matmul.dispatch.repetitions import AXIS, Repetitions
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.backends import BACKENDS
from collective_matmul.ops.attention.context.request import OP, ContextRequest
from collective_matmul.ops.attention.kernel import wide_dtype


class ContextOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      local: this device's part of the sequence.
      kept: of a backward pass, the result, the log-sum-exp and the gradient of the result.
      weights: nothing, for each repetition.
    """

    local: SequenceShard
    kept: Any
    weights: Sequence[Any]


class ContextRepetitions(Repetitions):
    """A flat request, repeated, on the first `axis_size` of some devices."""

    prepares = True

    def __init__(self, request: ContextRequest, devices: Sequence[Any]):
        seconds = context_cost.attention_seconds(request) + request.communication_seconds
        super().__init__(request, devices, seconds)
        self.request: ContextRequest = request

    def plain_operands(self, implementation: str) -> ContextOperands:
        """The arrays of all devices; numbers of segments are any."""
        del implementation
        request = self.request
        rows = request.axis_size * request.batch
        query = (rows, request.tokens, request.heads, request.head_size)
        key = (rows, request.tokens, request.key_value_heads, request.head_size)
        ids: Any = None
        if request.segments is not None:
            ids = self._array(query[:2], jnp.float32)
        queries: Any = self._array(query, request.dtype)
        keys: Any = self._array(key, request.dtype)
        local = SequenceShard(queries, keys, keys, ids)
        kept = None
        if request.direction == "backward":
            statistics = rows, request.heads, request.tokens
            wide = self._array(statistics, wide_dtype(request.dtype))
            kept = local.query, wide, local.query
        return ContextOperands(local, kept, [()] * self.repetitions)

    def prepare_shards(self, operands: ContextOperands) -> ContextOperands:
        """Numbers of segments of equal length."""
        if operands.local.ids is None:
            return operands
        assert self.request.segments is not None
        positions = self.request.chunks.positions(axis_index(AXIS))
        size = -(-self.request.length // self.request.segments)
        ids = jnp.broadcast_to(positions // np.int32(size), operands.local.ids.shape)
        return operands._replace(local=operands.local._replace(ids=ids))

    def execute(self, backend: Backend, operands: ContextOperands, weights: Any) -> tuple[Any, Any]:
        """One pass."""
        del weights
        request = replace(self.request, axis_name=(AXIS,))
        found = cast(ContextBackend, backend)
        if request.direction == "forward":
            return found.forward(request, operands.local), ()
        return found.backward(request, operands.local, *operands.kept), ()


register_op(Op(OP, BACKENDS, ContextRequest.from_fields, ContextRepetitions))
