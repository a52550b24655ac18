"""Arrays that every device has in a launch, and how it stores to those of a peer, their peer_buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from collective_matmul.mosaic_gpu.peer_memory import (
    ADDRESS,
    SCALAR,
    Address,
    ThreadScope,
    inline_ptx,
    llvm_pointer,
    synchronize,
)

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu


class PeerBuffer(NamedTuple):
    """An array of this device, and where its peer_buffer lies, the array that a peer has in its place."""

    array: Any
    address: Address


_PEER_BUFFER = (plgpu.RefType(), ADDRESS)


def async_remote_store(
    box: Any, place: Any, peer_buffer: PeerBuffer, *wanted: Any, scope: ThreadScope
) -> None:
    """Starts to copy a box of shared memory to a peer_buffer.

    The copy is part of the group that is committed next. Nothing here branches: the lanes may be
    those that multiply.

    Args:
      box: contiguous, in shared memory.
      place: as large a part of this device's array, contiguous; the box goes to that of the peer_buffer.
      peer_buffer: of the array.
      *wanted: conditions, all of which hold if the box is to be copied.
      scope: that call this.
    """
    types = (plgpu.RefType(), plgpu.RefType(), _PEER_BUFFER, *[SCALAR] * len(wanted))

    @plgpu.inline_mgpu(arg_types=types)
    def at(_, box, place, peer_buffer, *wanted):
        chosen = utils.single_thread_predicate(scope)
        for condition in wanted:
            chosen = arith.andi(chosen, condition.registers.item())
        kind = ir.MemRefType(box.type)
        size = math.prod(kind.shape) * utils.bytewidth(kind.element_type)
        size = gpu.c(size, ir.IntegerType.get_signless(32))
        operands = [chosen, _in_peer_buffer(place, *peer_buffer), utils.memref_ptr(box), size]
        inline_ptx(
            None, operands, "@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;"
        )

    at(box, place, (peer_buffer.array, tuple(peer_buffer.address)), *wanted)


def signal_peers(word: Any, peer_buffers: Sequence[PeerBuffer], scope: ThreadScope) -> None:
    """Adds one to a word of peer_buffers, behind all that the lanes have stored anywhere.

    Args:
      word: of this device's array.
      peer_buffers: of the array.
      scope: that call this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [_PEER_BUFFER] * len(peer_buffers)))
    def at(_, word, peer_buffers):
        synchronize(scope)
        chosen = utils.single_thread_predicate(scope)
        # One fence for all: it takes as long as a message on its way.
        inline_ptx(None, [chosen], "@$0 fence.acq_rel.sys;")
        for peer_buffer in peer_buffers:
            operands = [chosen, _in_peer_buffer(word, *peer_buffer)]
            inline_ptx(None, operands, "@$0 red.relaxed.sys.global.add.u32 [$1], 1;")

    at(word, [(peer_buffer.array, tuple(peer_buffer.address)) for peer_buffer in peer_buffers])


def _in_peer_buffer(place: Any, array: Any, where: Any) -> Any:
    """To the part of an array's peer_buffer that is such a place of the array."""
    i64 = ir.IntegerType.get_signless(64)
    here, start = (llvm.ptrtoint(i64, utils.memref_ptr(part)) for part in (place, array))
    return llvm_pointer(where, arith.subi(here, start))
