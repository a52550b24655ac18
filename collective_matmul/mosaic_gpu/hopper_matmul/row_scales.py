"""Loads scales of packed rows, which peers may have stored while the kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar
from collective_matmul.mosaic_gpu.peers.peer_memory import SCALAR

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

#: Bytes of a scale.
FLOAT32_BYTES = 4
# Rows of an MMA warpgroup's part of a tile.
_ROWS = 64


def load_from_rows(
    arrays: Sequence[Ref], number: Scalar, plane: Scalar, row: Scalar, column: Scalar
) -> jax.Array:
    """Returns a float32 number of each of 64 rows, in the layout of rows of wgmma's results.

    For rows beyond the last one of the plane it returns that of the last: what is beyond may not
    be there, or not have arrived.

    These are ordinary loads, which may hit the L1 cache. It has no older value that counts: a block
    loads rows of its tiles after they have arrived. Only a block of a cluster whose tile is beyond
    the last row may load that row before. Its product is not stored, and no tile of it has the row.

    Args:
      arrays: bytes [planes, rows, columns], with equal rows.
      number: of the array to load from.
      plane: of the array.
      row: the first row.
      column: where the numbers begin in their rows, a multiple of 4.
    """
    layout = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct((_ROWS,), jnp.float32, layout=layout)
    _, rows, columns = arrays[0].shape

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(arrays), *[SCALAR] * 4), return_type=result
    )
    def at(_, arrays, *scalars):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        number, plane, row, column = (arith.extui(i64, s.registers.item()) for s in scalars)
        base = llvm.ptrtoint(i64, utils.memref_ptr(arrays[0]))
        for index, array in enumerate(arrays[1:], 1):
            is_it = arith.cmpi(arith.CmpIPredicate.eq, number, gpu.c(index, i64))
            base = arith.select(is_it, llvm.ptrtoint(i64, utils.memref_ptr(array)), base)
        first = arith.muli(plane, gpu.c(rows, i64))

        def load(within: Any) -> Any:
            within = arith.addi(row, arith.index_castui(i64, within))
            within = arith.minui(within, gpu.c(rows - 1, i64))
            offset = arith.muli(arith.addi(first, within), gpu.c(columns, i64))
            address = arith.addi(base, arith.addi(offset, column))
            pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)
            return llvm.load(ir.VectorType.get((1,), f32), pointer, alignment=FLOAT32_BYTES)

        fragments = layout.to_mgpu()
        assert fragments.vector_length == 1
        registers = np.empty(fragments.registers_shape((_ROWS,)), dtype=object)
        for place, (within,) in zip(
            np.ndindex(registers.shape), fragments.thread_idxs((_ROWS,)), strict=True
        ):
            registers[place] = load(within)
        return gpu.FragmentedArray(_registers=registers, _layout=fragments, _is_signed=None)

    return at(list(arrays), *map(jnp.int32, (number, plane, row, column)))
