"""Pieces of keys and values that travel between devices, and of their gradients that come home.

A piece is a chunk of the sequence. The device that receives it names it by `offset`, its owner
being the device that many places before it, and by `half`, which of the owner's chunks it is. All
devices receive the same pieces, since they run one program: a piece travels if any device needs it.

Legend: D devices, C chunks of the sequence, c tokens of a chunk, P pieces that a device has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.operands.arithmetic import add
from collective_matmul.ops.attention.context.layout import Chunks
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.schedule.walk import walk_exchange


class Piece(NamedTuple):
    """A chunk of the device that is `offset` places before this one."""

    offset: int
    half: int


def chunks_attended(chunks: Chunks, request: ContextRequest, number: int) -> range:
    """The chunks that the tokens of a chunk attend to."""
    if not request.causal:
        return range(chunks.count)
    return range(max(0, number - chunks.chunks_before(request.window)), number + 1)


@functools.cache
def pieces_of(request: ContextRequest) -> tuple[Piece, ...]:
    """The pieces that a device has when all have arrived; its own are first."""
    chunks, devices = request.chunks, request.axis_size
    by_device = chunks.numbers_by_device()
    owner = {
        n: (device, half) for device, own in enumerate(by_device) for half, n in enumerate(own)
    }
    pieces = {Piece(0, half) for half in range(chunks.local)}
    for device, own in enumerate(by_device):
        for attended in {x for number in own for x in chunks_attended(chunks, request, number)}:
            other, half = owner[attended]
            pieces.add(Piece((device - other) % devices, half))
    return tuple(sorted(pieces))


def bytes_of_pieces(request: ContextRequest) -> int:
    """Bytes of keys and values that each device sends."""
    travelling = sum(1 for piece in pieces_of(request) if piece.offset)
    return travelling * request.bytes_of_keys // request.chunks.local


def number_of(request: ContextRequest, device: jax.Array, piece: Piece) -> jax.Array:
    """The number of a piece's chunk in the sequence."""
    devices = np.int32(request.axis_size)
    owner = lax.rem(device + devices - np.int32(piece.offset), devices)
    return request.chunks.numbers(owner)[piece.half]


def rows_of_chunks(request: ContextRequest, device: jax.Array, numbers: jax.Array) -> jax.Array:
    """Index into `pieces_of` for each chunk: int32, of any shape; 0 for chunks of no piece."""
    chunks, devices = request.chunks, np.int32(request.axis_size)
    is_late = numbers >= devices  # Of the zigzag layout alone.
    owner = jnp.where(is_late, np.int32(chunks.count - 1) - numbers, numbers)
    offset = lax.rem(device + devices - owner, devices)
    table = np.zeros((2, request.axis_size), np.int32)
    for row, piece in enumerate(pieces_of(request)):
        table[piece.half, piece.offset] = row
    return jnp.asarray(table.reshape(-1))[is_late.astype(jnp.int32) * devices + offset]


def gather(request: ContextRequest, key: jax.Array, value: jax.Array) -> dict[Piece, jax.Array]:
    """Keys and values of all pieces, [2, B, c, K, H] each.

    A device sends one message to each other device that is to have something.
    """
    both = jnp.stack([key, value])
    halves = jnp.split(both, request.chunks.local, axis=2)
    by_offset = _by_offset(request)
    blocks = [
        both if len(own) == len(halves) else {half: halves[half] for half in own}
        for own in by_offset
    ]
    arrived = walk_exchange(blocks, request.axis_name)
    pieces = {Piece(0, half): array for half, array in enumerate(halves)}
    for offset, own in enumerate(by_offset):
        if offset and len(own) == len(halves):
            found = jnp.split(arrived[offset], len(halves), axis=2)
            pieces |= {Piece(offset, half): array for half, array in enumerate(found)}
        elif offset:
            pieces |= {Piece(offset, half): arrived[offset][half] for half in own}
    return pieces


def send_home(request: ContextRequest, terms: Mapping[Piece, jax.Array]) -> jax.Array:
    """The sums over devices of what each has for this device's chunks: [2, B, s, K, H].

    Args:
      request: the request.
      terms: for each of `pieces_of`, [2, B, c, K, H].

    Returns:
      Sums in the terms' dtype, added in a fixed order, in at least float32.
    """
    by_offset, devices = _by_offset(request), request.axis_size
    blocks: list[dict[int, jax.Array] | jax.Array] = [{} for _ in range(devices)]
    for offset, own in enumerate(by_offset):
        parts = {half: terms[Piece(offset, half)] for half in own}
        is_whole = offset and len(own) == request.chunks.local
        back = -offset % devices
        blocks[back] = jnp.concatenate([parts[h] for h in own], axis=2) if is_whole else parts
    arrived = walk_exchange(blocks, request.axis_name)
    home: dict[int, list[jax.Array]] = {half: [] for half in range(request.chunks.local)}
    for back in range(devices):
        own, found = by_offset[-back % devices], arrived[back]
        if isinstance(found, jax.Array):
            found = dict(enumerate(jnp.split(found, request.chunks.local, axis=2)))
        for half in own:
            home[half].append(found[half])
    return jnp.concatenate([add(*each) for _, each in sorted(home.items())], axis=2)


def ids_in_order(request: ContextRequest, ids: jax.Array) -> jax.Array:
    """The numbers of segments of the whole sequence, counted from 0: int32 [B, C, c].

    Every device receives those of all devices.
    """
    device, chunks = axis_index(request.axis_name), request.chunks
    arrived = jnp.stack(walk_exchange([ids] * request.axis_size, request.axis_name))
    arrived = arrived.reshape(request.axis_size, ids.shape[0], chunks.local, chunks.size)
    numbers = np.arange(chunks.count, dtype=np.int32)
    is_late = numbers >= request.axis_size
    owner = np.where(is_late, chunks.count - 1 - numbers, numbers).astype(np.int32)
    offset = lax.rem(device + np.int32(request.axis_size) - owner, np.int32(request.axis_size))
    whole = jnp.moveaxis(arrived[offset, :, is_late.astype(np.int32)], 0, 1)
    flat = whole.reshape(ids.shape[0], -1)
    changes = jnp.pad(flat[:, 1:] != flat[:, :-1], ((0, 0), (1, 0)))
    assert request.segments is not None
    counted = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
    return jnp.minimum(counted, np.int32(request.segments - 1)).reshape(whole.shape)


def _by_offset(request: ContextRequest) -> list[list[int]]:
    """The halves that are received from each offset."""
    found: list[list[int]] = [[] for _ in range(request.axis_size)]
    for piece in pieces_of(request):
        found[piece.offset].append(piece.half)
    return found
