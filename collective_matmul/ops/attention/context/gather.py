"""The gather: keys and values straight from all devices that have some, then few large calls.

A kernel that takes parts attends by one call: see `local.packed`. Others attend to the own keys
while the others travel, then to those of each other device: see `local.device_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.backend import ContextBackend, SequenceShard
from collective_matmul.ops.attention.context.local.alone import (
    attend_alone,
    gradients_alone,
    kernel_for,
)
from collective_matmul.ops.attention.context.local.device_blocks import Queries
from collective_matmul.ops.attention.context.local.masked import (
    Tokens,
    attend_by_positions,
    gradients_by_positions,
)
from collective_matmul.ops.attention.context.local.merging import merge
from collective_matmul.ops.attention.context.local.packed import PackedAttention
from collective_matmul.ops.attention.context.pieces import (
    Piece,
    gather,
    ids_in_order,
    number_of,
    pieces_of,
    send_home,
)
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients

#: Its model is not compared with measurements yet.
_ERROR = 0.02


class GatherContext(ContextBackend):
    """Keys and values by copies between peers, in one message to each device."""

    name = "gather"

    def forward(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array]:
        """See `ContextBackend`."""
        if request.axis_size == 1:
            return attend_alone(request, operands)
        ids = _ids(request, operands)
        pieces = gather(request, operands.key, operands.value)
        kernel = kernel_for(request, request.attention())
        if kernel.takes_parts:
            return PackedAttention(request, kernel, ids).forward(operands.query, pieces)
        if request.window is not None or ids is not None:
            (key, value), queries, keys = _in_masks(request, ids, pieces)
            return attend_by_positions(request, operands.query, key, value, queries, keys)
        queries = Queries(request, operands.query, None)
        terms = [queries.attend(keys, offset) for offset, keys in _by_device(request, pieces)]
        attended = merge(*terms)
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
        ids = _ids(request, operands)
        pieces = gather(request, operands.key, operands.value)
        query, kept = operands.query, (out, log_sum_exp, cotangent)
        kernel = kernel_for(request, request.attention())
        if kernel.takes_parts:
            packed = PackedAttention(request, kernel, ids)
            dquery, terms = packed.backward(query, pieces, *kept)
        elif request.window is not None or ids is not None:
            (key, value), queries, keys = _in_masks(request, ids, pieces)
            found = gradients_by_positions(request, query, key, value, queries, keys, *kept)
            dquery, dkeys = found[0], jnp.stack(found[1:])
            cut = jnp.split(dkeys, len(pieces), axis=2)
            terms = dict(zip(pieces_of(request), cut, strict=True))
        else:
            dquery, terms = _block_gradients(Queries(request, query, None, kept), pieces)
        dkey, dvalue = send_home(request, terms)
        return dquery.astype(query.dtype), dkey, dvalue

    def unsupported_reason(self, request: ContextRequest) -> str | None:
        """Permutes meet on all devices."""
        return no_permutes_reason(request)

    def predict(self, request: ContextRequest) -> Prediction | None:
        """Its copies and its attention; None for unknown devices, and for one."""
        gpu = rates()
        if gpu is None or request.axis_size == 1:
            return None
        return Prediction(context_cost.gather_seconds(request), _ERROR, gpu.basis)


def _ids(request: ContextRequest, operands: SequenceShard) -> jax.Array | None:
    return None if operands.ids is None else ids_in_order(request, operands.ids)


def _by_device(
    request: ContextRequest, pieces: Mapping[Piece, jax.Array]
) -> list[tuple[int, jax.Array]]:
    """The keys and values [2, B, s, K, H] of each device that sent all, by its offset."""
    local = range(request.chunks.local)
    return [
        (offset, jnp.concatenate([pieces[Piece(offset, half)] for half in local], axis=2))
        for offset in range(request.axis_size)
    ]


def _block_gradients(
    queries: Queries, pieces: Mapping[Piece, jax.Array]
) -> tuple[jax.Array, dict[Piece, jax.Array]]:
    request = queries.request
    total, terms = None, {}
    for offset, keys in _by_device(request, pieces):
        dquery, dkeys = queries.gradients(keys, offset)
        dquery = dquery.astype(accumulator(dquery.dtype))
        total = dquery if total is None else total + dquery
        halves = jnp.split(dkeys, request.chunks.local, axis=2)
        terms |= {Piece(offset, half): each for half, each in enumerate(halves)}
    assert total is not None
    return total, terms


def _in_masks(
    request: ContextRequest, ids: jax.Array | None, pieces: Mapping[Piece, jax.Array]
) -> tuple[jax.Array, Tokens, Tokens]:
    """All keys and values that arrived, [2, B, T, K, H]; and where queries and keys are."""
    device = axis_index(request.axis_name)
    numbers = [number_of(request, device, piece) for piece in pieces_of(request)]

    def tokens(numbers: list[jax.Array]) -> Tokens:
        positions = request.chunks.positions_of_chunks(numbers)
        if ids is None:
            return Tokens(positions, None)
        own = [lax.dynamic_index_in_dim(ids, n, axis=1, keepdims=False) for n in numbers]
        return Tokens(positions, lax.concatenate(own, 1))

    keys = jnp.concatenate([pieces[piece] for piece in pieces_of(request)], axis=2)
    return keys, tokens(request.chunks.numbers(device)), tokens(numbers)
