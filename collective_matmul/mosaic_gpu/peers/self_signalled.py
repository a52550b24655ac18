"""Messages that need no signal: a word of the receiver's memory changes when the message is there.

Memory that receives messages holds the *sentinel* in every word of 32 bits. A sender stores words
that differ from it. The receiver polls the message itself until no word is the sentinel, and then
puts the sentinel back. So a message takes one trip over the link; one with a signal takes a second
trip, since the signal waits for the stores before it.

The sentinel is a pair of NaNs of bfloat16 or float16, all bits of which are set. In a message, such
a pair becomes a pair of other NaNs. All other values travel unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from collective_matmul.mosaic_gpu.peers.peer_memory import (
    ADDRESS,
    SCALAR,
    VECTOR_BYTES,
    WARPGROUP_LANES,
    Address,
    inline_ptx,
    lane_pointers,
    layout,
)
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited, polling
from collective_matmul.mosaic_gpu.peers.symmetric_workspace import SENTINEL

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

_OTHER_NANS = 0x7FFF7FFF
_WORDS = VECTOR_BYTES // 4

_IS_SENTINEL = f"""ld.relaxed.sys.global.u32 seen, [$0];
setp.eq.s32 p, seen, {SENTINEL};"""


def store_message(address: Address, value: jax.Array) -> None:
    """Stores an array of half precision, whose layout is `layout` of its shape, as a message."""

    @plgpu.inline_mgpu(arg_types=(*ADDRESS, layout(value.shape, value.dtype)))
    def at(_, *words_and_array):
        *words, array = words_and_array
        registers = array.registers.flat
        for register, pointer in zip(registers, lane_pointers(words, len(registers)), strict=True):
            _store_vector(pointer, _without_sentinels(register))

    at(*address, value)


def take_message(
    epoch: Any, address: Address, shape: tuple[int, ...], dtype: Any, awaited: Awaited
) -> jax.Array:
    """Returns the message at an address when it is there, and puts the sentinel in its place.

    Args:
      epoch: the number of the exchange, for the report of a wait that takes too long.
      address: where the message arrives.
      shape: shape of the array.
      dtype: bfloat16 or float16.
      awaited: what the message is.
    """
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout(shape, dtype))
    poll = polling(_IS_SENTINEL, awaited)
    count = math.prod(shape) * jnp.dtype(dtype).itemsize // (WARPGROUP_LANES * VECTOR_BYTES)

    @plgpu.inline_mgpu(arg_types=(SCALAR, ADDRESS, ADDRESS), return_type=result)
    def at(_, epoch, words, report):
        pointers = lane_pointers(words, count)
        # The last vector probably arrives last. Polling one leaves the memory to the messages.
        poll(pointers[-1], epoch.registers.item(), report)
        vectors = _load_vectors(pointers)
        ones = _constant(SENTINEL)
        for pointer in pointers:
            llvm.store(ones, pointer, alignment=VECTOR_BYTES)
        elements = VECTOR_BYTES // jnp.dtype(dtype).itemsize
        kind = ir.VectorType.get((elements,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        registers = [vector.bitcast(kind, words) for words in vectors]
        return gpu.FragmentedArray(
            _registers=np.array(registers, dtype=object),
            _layout=result.layout.to_mgpu(),
            _is_signed=None,
        )

    return at(epoch, tuple(address), tuple(awaited.report))


# What inline code consists of. Arguments are MLIR values here.


def _words_type() -> Any:
    return ir.VectorType.get((_WORDS,), ir.IntegerType.get_signless(32))


def _constant(word: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    splat = ir.DenseElementsAttr.get_splat(_words_type(), ir.IntegerAttr.get(i32, word))
    return arith.constant(_words_type(), splat)


def _without_sentinels(register: Any) -> Any:
    """Returns the words of a vector, with other NaNs in place of the sentinel."""
    words = vector.bitcast(_words_type(), register)
    is_sentinel = arith.cmpi(arith.CmpIPredicate.eq, words, _constant(SENTINEL))
    return arith.select(is_sentinel, _constant(_OTHER_NANS), words)


def _store_vector(pointer: Any, words: Any) -> None:
    """Stores a vector of words so that a peer sees each of them whole, at some time."""
    i32 = ir.IntegerType.get_signless(32)
    each = [llvm.extractelement(words, gpu.c(number, i32)) for number in range(_WORDS)]
    inline_ptx(None, [pointer, *each], "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};")


def _load_vectors(pointers: Sequence[Any]) -> list[Any]:
    """Returns the vectors of words at the pointers, loaded until none of the words is the sentinel.

    All loads are under way at the same time.
    """
    i32, count = ir.IntegerType.get_signless(32), len(pointers) * _WORDS
    lines = []
    for number in range(len(pointers)):
        names = ", ".join(f"${number * _WORDS + word}" for word in range(_WORDS))
        lines.append(f"ld.relaxed.sys.global.v4.b32 {{{names}}}, [${count + number}];")
    lines.append(f"setp.eq.s32 p, $0, {SENTINEL};")
    lines += [f"setp.eq.or.s32 p, ${word}, {SENTINEL}, p;" for word in range(1, count)]
    body = "\n".join(lines)
    loaded: Any = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"),
        list(pointers),
        f"{{\n.reg .pred p;\nLOAD:\n{body}\n@p bra LOAD;\n}}",
        # Outputs are written before the pointers are read for the last time.
        ",".join(["=&r"] * count + ["l"] * len(pointers) + ["~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )
    words = [llvm.extractvalue(i32, loaded, [number]) for number in range(count)]
    return [
        vector.from_elements(_words_type(), words[first : first + _WORDS])
        for first in range(0, count, _WORDS)
    ]
