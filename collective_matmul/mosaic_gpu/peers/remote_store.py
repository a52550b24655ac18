"""Stores to a peer's arrays, and the semaphores that tell the peer that they have arrived.

Every device has the same arrays in a launch, at addresses of its own. The array that a peer has in
the place of one of this device's arrays is its *peer buffer*. A place in a peer buffer is given as
the same place of this device's array: its byte offset within the array is the same on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from collective_matmul.mosaic_gpu.peers.peer_memory import (
    ADDRESS,
    SCALAR,
    Address,
    ThreadScope,
    inline_ptx,
    llvm_pointer,
    synchronize,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu


class PeerBuffer(NamedTuple):
    """An array of this device, and the address of the array that a peer has in its place."""

    array: Any
    address: Address


_PEER_BUFFER = (plgpu.RefType(), ADDRESS)


def async_remote_store(
    box: Any, place: Any, peer_buffer: PeerBuffer, *conditions: Any, scope: ThreadScope
) -> None:
    """Starts to copy a box of shared memory to a peer.

    The copy is part of the group that is committed next. This is a plain bulk copy, which needs an
    address and a size. The tensor copies that Pallas emits need a descriptor, which the host
    prepares, and the host does not know where the peer's array is.

    Args:
      box: a reference to contiguous shared memory.
      place: a contiguous reference of the same size into this device's array; the box is stored at
        this place of the peer buffer.
      peer_buffer: the peer's buffer for that array.
      *conditions: the copy is made if all of them hold. They are predicates, not branches: the
        threads may be in the middle of asynchronous multiplications.
      scope: the threads that call this.
    """
    types = (plgpu.RefType(), plgpu.RefType(), _PEER_BUFFER, *[SCALAR] * len(conditions))

    @plgpu.inline_mgpu(arg_types=types)
    def at(_, box, place, peer_buffer, *conditions):
        predicate = utils.single_thread_predicate(scope)
        for condition in conditions:
            predicate = arith.andi(predicate, condition.registers.item())
        box_type = ir.MemRefType(box.type)
        size = math.prod(box_type.shape) * utils.bytewidth(box_type.element_type)
        size = gpu.c(size, ir.IntegerType.get_signless(32))
        operands = [predicate, _pointer_in(peer_buffer, place), utils.memref_ptr(box), size]
        text = "@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;"
        inline_ptx(None, operands, text)

    at(box, place, (peer_buffer.array, tuple(peer_buffer.address)), *conditions)


def signal_peers(semaphore: Any, peer_buffers: Sequence[PeerBuffer], scope: ThreadScope) -> None:
    """Adds one to a semaphore of each peer.

    The fence orders this after all that the threads have stored, and have waited for: a peer that
    sees the semaphore's new value sees that too.

    Args:
      semaphore: a reference to an element of this device's array of semaphores.
      peer_buffers: the peers' buffers for that array.
      scope: the threads that call this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [_PEER_BUFFER] * len(peer_buffers)))
    def at(_, semaphore, peer_buffers):
        synchronize(scope)
        predicate = utils.single_thread_predicate(scope)
        # One fence for all peers: it takes as long as a message on its way.
        inline_ptx(None, [predicate], "@$0 fence.acq_rel.sys;")
        for peer_buffer in peer_buffers:
            operands = [predicate, _pointer_in(peer_buffer, semaphore)]
            inline_ptx(None, operands, "@$0 red.relaxed.sys.global.add.u32 [$1], 1;")

    at(semaphore, [(buffer.array, tuple(buffer.address)) for buffer in peer_buffers])


def _pointer_in(peer_buffer: Any, place: Any) -> Any:
    """Returns the pointer to that place of a peer buffer; all are MLIR values."""
    array, address = peer_buffer
    i64 = ir.IntegerType.get_signless(64)
    here, start = (llvm.ptrtoint(i64, utils.memref_ptr(part)) for part in (place, array))
    return llvm_pointer(address, arith.subi(here, start))
