"""Ulysses: an all-to-all exchanges parts of sequences for parts of heads, and back.

Between the two, a device has all tokens of N / D query heads and K / D key and value heads, and
attends to them as one device does, by any kernel, with its windows and segments. Jacobs et al.,
"DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023.

A device sends (D - 1) / D of its queries, keys and values, and as much of the result, where a
gather sends its keys and values D - 1 times: (N + K) / (K D) of the gather's bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.local.alone import attend_alone, gradients_alone
from collective_matmul.ops.attention.context.pieces import ids_in_order
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients
from collective_matmul.schedule.walk import walk_exchange

#: Its model is not compared with measurements yet.
_ERROR = 0.02


class UlyssesContext(ContextBackend):
    """All tokens of some heads, by copies between peers."""

    name = "ulysses"

    def forward(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array]:
        """See `ContextBackend`."""
        if request.axis_size == 1:
            return attend_alone(request, operands)
        query, key, value = _by_heads(request, *operands[:3])
        shard = SequenceShard(query, key, value, _ids(request, operands))
        out, log_sum_exp = attend_alone(request, shard)
        # [B, N, S] -> [B, S, N, 1]
        rows = jnp.swapaxes(log_sum_exp, 1, 2)[..., None]
        out, rows = _by_tokens(request, out, rows)
        return out, jnp.swapaxes(rows[..., 0], 1, 2)

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
        rows = jnp.swapaxes(log_sum_exp, 1, 2)[..., None]
        arrays = *operands[:3], out, cotangent, rows
        query, key, value, out, cotangent, rows = _by_heads(request, *arrays)
        shard = SequenceShard(query, key, value, _ids(request, operands))
        rows = jnp.swapaxes(rows[..., 0], 1, 2)
        gradients = gradients_alone(request, shard, out, rows, cotangent)
        dquery, dkey, dvalue = _by_tokens(request, *gradients)
        return dquery, dkey, dvalue

    def lacking_reason(self, request: ContextRequest) -> str | None:
        """Heads of keys are divided over devices."""
        if request.key_value_heads % request.axis_size:
            return (
                f"it divides key and value heads over devices, and there are"
                f" {request.key_value_heads} for {request.axis_size} devices"
            )
        return None

    def unsupported_reason(self, request: ContextRequest) -> str | None:
        """Permutes meet on all devices."""
        return no_permutes_reason(request)

    def predict(self, request: ContextRequest) -> Prediction | None:
        """Its exchanges and its attention; None for unknown devices, and for one."""
        gpu = rates()
        if gpu is None or request.axis_size == 1:
            return None
        return Prediction(context_cost.ulysses_seconds(request), _ERROR, gpu.basis)


def _by_heads(request: ContextRequest, *arrays: jax.Array) -> list[jax.Array]:
    """[B, s, heads, ...] of this device's tokens -> [B, S, heads / D, ...], by positions."""
    devices = request.axis_size
    turned = [_from_this_device(request, jnp.stack(jnp.split(x, devices, axis=2))) for x in arrays]
    blocks = [[x[offset] for x in turned] for offset in range(devices)]
    arrived = walk_exchange(blocks, request.axis_name)
    # Block i is from the device i places before this one.
    before = [arrived[-offset % devices] for offset in range(devices)]
    whole = []
    for parts in zip(*before, strict=True):
        ordered = _from_first_device(request, jnp.stack(parts))  # [D, B, s, heads / D, ...]
        tokens = jnp.concatenate(list(ordered), axis=1)
        whole.append(request.chunks.in_order_of_positions(tokens, 1))
    return whole


def _by_tokens(request: ContextRequest, *arrays: jax.Array) -> list[jax.Array]:
    """The inverse of `_by_heads`."""
    devices = request.axis_size
    turned = []
    for x in arrays:
        tokens = request.chunks.in_order_of_devices(x, 1)
        turned.append(_from_this_device(request, jnp.stack(jnp.split(tokens, devices, axis=1))))
    blocks = [[x[offset] for x in turned] for offset in range(devices)]
    arrived = walk_exchange(blocks, request.axis_name)
    before = [arrived[-offset % devices] for offset in range(devices)]
    return [
        jnp.concatenate(list(_from_first_device(request, jnp.stack(parts))), axis=2)
        for parts in zip(*before, strict=True)
    ]


def _from_this_device(request: ContextRequest, blocks: jax.Array) -> jax.Array:
    """[D, ...], one for each device -> those of the devices from this one on."""
    return _rotated(blocks, axis_index(request.axis_name))


def _from_first_device(request: ContextRequest, blocks: jax.Array) -> jax.Array:
    """The inverse of `_from_this_device`."""
    devices = np.int32(request.axis_size)
    return _rotated(blocks, lax.rem(devices - axis_index(request.axis_name), devices))


def _rotated(blocks: jax.Array, start: jax.Array) -> jax.Array:
    index = lax.rem(lax.iota(jnp.int32, len(blocks)) + start, np.int32(len(blocks)))
    return jnp.take(blocks, index, axis=0)


def _ids(request: ContextRequest, operands: SequenceShard) -> jax.Array | None:
    if operands.ids is None:
        return None
    return ids_in_order(request, operands.ids).reshape(request.batch, request.length)
