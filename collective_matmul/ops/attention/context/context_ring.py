"""The ring: keys and values of one device after the other, for lengths where all do not fit.

While a device attends to the keys of one device, those of the next travel. Results are merged by
their log-sum-exp. In the backward pass the gradients of keys and values go straight home while the
device works on the next. Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite
Context", 2023; in the zigzag layout all steps take equally long (Brandon et al., "Striped
Attention", 2023, has another such layout).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.local.alone import attend_alone, gradients_alone
from collective_matmul.ops.attention.context.local.device_blocks import Queries
from collective_matmul.ops.attention.context.local.merging import Attended, merge
from collective_matmul.ops.attention.context.pieces import ids_in_order
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients
from collective_matmul.schedule.round_trip import visits_of, walk_round_trip
from collective_matmul.schedule.schedules import Chunk, Pattern
from collective_matmul.schedule.walk import Gather, walk_gather

_PATTERN: Pattern = "one_way"

#: Its model is not compared with measurements yet.
_ERROR = 0.02


class RingContext(ContextBackend):
    """Keys and values travel round a ring of permutes: every request."""

    name = "ring"
    copies_between_peers = True

    def forward(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array]:
        """See `ContextBackend`."""
        if request.axis_size == 1:
            return attend_alone(request, operands)
        queries = Queries(request, operands.query, _ids(request, operands))

        def attend(chunk: Chunk, keys: jax.Array, query: Any, attended: Any) -> Attended:
            found = queries.replaced(query).attend(keys, -chunk.offset % request.axis_size)
            return found if attended is None else merge(attended, found)

        attended = walk_gather(_gather(request, operands), attend, queries.arrays, None)
        return attended.out.astype(operands.query.dtype), attended.log_sum_exp

    def backward(
        self,
        request: ContextRequest,
        operands: SequenceShard,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
    ) -> Gradients:
        """See `ContextBackend`."""
        if request.axis_size == 1:
            return gradients_alone(request, operands, out, log_sum_exp, cotangent)
        kept = out, log_sum_exp, cotangent
        queries = Queries(request, operands.query, _ids(request, operands), kept)
        gather = _gather(request, operands)
        visits = visits_of(gather.schedule, request.tokens)
        wide = accumulator(operands.query.dtype)

        def work(number: int, keys: jax.Array, arrays: Any) -> Any:
            offset = -visits[number].chunk.offset % request.axis_size
            dquery, dkeys = queries.replaced(arrays).gradients(keys, offset)
            return [lambda state: state[0]], (dkeys, dquery)

        def finish(number: int, state: Any, arrays: Any, total: jax.Array | None) -> jax.Array:
            del number, arrays
            term = state[1].astype(wide)
            return term if total is None else total + term

        dkeys, dquery = walk_round_trip(gather, visits, work, finish, queries.arrays, None)
        return dquery.astype(operands.query.dtype), dkeys[0], dkeys[1]

    def unsupported_reason(self, request: ContextRequest) -> str | None:
        """Permutes meet on all devices."""
        return no_permutes_reason(request)

    def predict(self, request: ContextRequest) -> Prediction | None:
        """Its steps; None for unknown devices, and for one."""
        gpu = rates()
        if gpu is None or request.axis_size == 1:
            return None
        return Prediction(context_cost.ring_seconds(request), _ERROR, gpu.basis)


def _gather(request: ContextRequest, operands: SequenceShard) -> Gather:
    both = jnp.stack([operands.key, operands.value])
    return Gather(both, _PATTERN, request.axis_name, 2)


def _ids(request: ContextRequest, operands: SequenceShard) -> jax.Array | None:
    return None if operands.ids is None else ids_in_order(request, operands.ids)
