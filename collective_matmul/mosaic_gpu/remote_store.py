"""Arrays that every device has in a launch, and how it stores to those of a peer, their twins."""

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
    SCALAR,
    WHERE,
    Address,
    Lanes,
    assembly,
    pointer,
    synchronize,
)

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu


class Twin(NamedTuple):
    """An array of this device, and where its twin lies, the array that a peer has in its place."""

    array: Any
    address: Address


_TWIN = (plgpu.RefType(), WHERE)


def store_box(box: Any, place: Any, twin: Twin, *wanted: Any, lanes: Lanes) -> None:
    """Starts to copy a box of shared memory to a twin.

    The copy is part of the group that is committed next. Nothing here branches: the lanes may be
    those that multiply.

    Args:
      box: contiguous, in shared memory.
      place: as large a part of this device's array, contiguous; the box goes to that of the twin.
      twin: of the array.
      *wanted: conditions, all of which hold if the box is to be copied.
      lanes: that call this.
    """
    types = (plgpu.RefType(), plgpu.RefType(), _TWIN, *[SCALAR] * len(wanted))

    @plgpu.inline_mgpu(arg_types=types)
    def at(_, box, place, twin, *wanted):
        chosen = utils.single_thread_predicate(lanes)
        for condition in wanted:
            chosen = arith.andi(chosen, condition.registers.item())
        kind = ir.MemRefType(box.type)
        size = math.prod(kind.shape) * utils.bytewidth(kind.element_type)
        size = gpu.c(size, ir.IntegerType.get_signless(32))
        operands = [chosen, _in_twin(place, *twin), utils.memref_ptr(box), size]
        assembly(None, operands, "@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;")

    at(box, place, (twin.array, tuple(twin.address)), *wanted)


def count_up(word: Any, twins: Sequence[Twin], lanes: Lanes) -> None:
    """Adds one to a word of twins, behind all that the lanes have stored anywhere.

    Args:
      word: of this device's array.
      twins: of the array.
      lanes: that call this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [_TWIN] * len(twins)))
    def at(_, word, twins):
        synchronize(lanes)
        chosen = utils.single_thread_predicate(lanes)
        # One fence for all: it takes as long as a message on its way.
        assembly(None, [chosen], "@$0 fence.acq_rel.sys;")
        for twin in twins:
            operands = [chosen, _in_twin(word, *twin)]
            assembly(None, operands, "@$0 red.relaxed.sys.global.add.u32 [$1], 1;")

    at(word, [(twin.array, tuple(twin.address)) for twin in twins])


def _in_twin(place: Any, array: Any, where: Any) -> Any:
    """To the part of an array's twin that is such a place of the array."""
    i64 = ir.IntegerType.get_signless(64)
    here, start = (llvm.ptrtoint(i64, utils.memref_ptr(part)) for part in (place, array))
    return pointer(where, arith.subi(here, start))
