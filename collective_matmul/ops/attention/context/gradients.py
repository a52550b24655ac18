"""Attention over a sharded sequence with its gradient. Call it inside `jax.shard_map`.

Keys and values are gathered again in the backward pass. Kept are this device's queries, keys,
values and numbers of segments, the result, and the log-sum-exp.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from collective_matmul.dispatch.selection import choose
from collective_matmul.ops.attention.attend import (
    ATTENTION_CHECKPOINT_NAME,
    sinks_gradient,
    with_sinks,
)
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.matmul.reverse_mode import ReverseMode, undifferentiated

Requested = tuple[str, ...] | None

#: Returns its arguments; refuses to be differentiated. Rules of gradients begin with it.
_once_differentiable = undifferentiated(
    lambda *values: values,
    "second derivatives of context_attention, as by jax.hessian or by jax.grad of jax.grad: the op"
    " defines first derivatives alone; differentiate it once",
)


@functools.partial(ReverseMode, nondiff_argnums=(2, 3))
def attention_over_devices(
    operands: SequenceShard, sinks: jax.Array | None, request: ContextRequest, requested: Requested
) -> jax.Array:
    """Attention of this device's queries.

    Args:
      operands: typed as varying over the same mesh axes.
      sinks: [N], likewise, or None. They take part in a softmax once it is over all keys.
      request: of the forward pass.
      requested: names of backends, best first, or None.

    Returns:
      [B, s, N, H].
    """
    return _forward(operands, sinks, request, requested)[0]


def _forward(
    operands: SequenceShard, sinks: jax.Array | None, request: ContextRequest, requested: Requested
) -> tuple[jax.Array, jax.Array]:
    *arrays, sinks = _once_differentiable(*operands, sinks)
    results = _chosen(request, requested).forward(request, SequenceShard(*arrays))
    return with_sinks(*results, sinks)


def _keeping(
    operands: SequenceShard, sinks: jax.Array | None, request: ContextRequest, requested: Requested
) -> tuple[jax.Array, Any]:
    results = _forward(operands, sinks, request, requested)
    out, log_sum_exp = (checkpoint_name(x, ATTENTION_CHECKPOINT_NAME) for x in results)
    return out, (operands, sinks, out, log_sum_exp)


def _backward(
    request: ContextRequest, requested: Requested, residuals: Any, cotangent: jax.Array
) -> Any:
    operands, sinks, out, log_sum_exp = residuals
    (cotangent,) = _once_differentiable(cotangent)
    # Without the barrier, XLA would keep what the forward gathered.
    tied = operands, out, log_sum_exp, cotangent
    operands, out, log_sum_exp, cotangent = lax.optimization_barrier(tied)
    request = replace(request, direction="backward")
    backend = _chosen(request, requested)
    gradients = backend.backward(request, operands, out, log_sum_exp, cotangent)
    ids: Any = None
    if operands.ids is not None:
        ids = np.zeros(operands.ids.shape, jax.dtypes.float0)
    dsinks = sinks_gradient(sinks, out, log_sum_exp, cotangent)
    return SequenceShard(*gradients, ids), dsinks


attention_over_devices.defvjp(_keeping, _backward)


def _chosen(request: ContextRequest, requested: Requested) -> ContextBackend:
    return cast(ContextBackend, choose(request, requested))
