"""Memory of any GPU of this process, as kernels reach it by its address.

XLA knows nothing of it. A kernel that reaches its peers in no other way is an ordinary one for the
host, which neither prepares each of its launches nor holds the devices before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

_SCALAR = plgpu.Layout.WG_SPLAT(())
_WHERE = (_SCALAR,) * 3

#: Bytes that a lane of a warpgroup moves at once, and its lanes.
VECTOR_BYTES = 16
LANES = 128

# For the first lane of a warpgroup: the others have met it before, or meet it then.
_FIRST_LANE = """{{
.reg .pred p;
.reg .u32 lane, word;
.reg .s32 ahead;
mov.u32 lane, %tid.x;
setp.ne.u32 p, lane, 0;
@p bra DONE;
{}
DONE:
}}"""
_ANNOUNCE = "st.relaxed.sys.global.u32 [${}], $0;"
_AWAIT = """WAIT{0}:
ld.acquire.sys.global.u32 word, [${0}];
sub.s32 ahead, word, $0;
setp.lt.s32 p, ahead, 0;
@p bra WAIT{0};"""


class Address(NamedTuple):
    """Some bytes behind the place that a pair of words gives, all int32 scalars of a warpgroup."""

    low: Any
    high: Any
    offset: Any

    def behind(self, count: Any) -> Address:
        """So many bytes behind this."""
        return self._replace(offset=self.offset + count)


def layout(shape: tuple[int, ...], dtype: Any) -> Any:
    """Of what `load` and `store` move: every lane has vectors of neighbouring elements."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=VECTOR_BYTES // jnp.dtype(dtype).itemsize)


def load(address: Address, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array that lies at an address."""
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout(shape, dtype))

    @plgpu.inline_mgpu(arg_types=_WHERE, return_type=result)
    def at(_, *where):
        elements = VECTOR_BYTES // jnp.dtype(dtype).itemsize
        vector = ir.VectorType.get((elements,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        count = math.prod(shape) // (LANES * elements)
        places = _vectors(where, count)
        vectors = [llvm.load(vector, place, alignment=VECTOR_BYTES) for place in places]
        return gpu.FragmentedArray(
            _registers=np.array(vectors, dtype=object),
            _layout=result.layout.to_mgpu(),
            _is_signed=None,
        )

    return at(*address)


def store(address: Address, value: jax.Array) -> None:
    """Puts an array, in the `layout` of its shape, to an address."""

    @plgpu.inline_mgpu(arg_types=(*_WHERE, layout(value.shape, value.dtype)))
    def at(_, *where_and_value):
        *where, array = where_and_value
        vectors = array.registers.flat
        for vector, place in zip(vectors, _vectors(where, len(vectors)), strict=True):
            llvm.store(vector, place, alignment=VECTOR_BYTES)

    at(*address, value)


def load_word(address: Address) -> jax.Array:
    """An int32 that lies at an address."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=_WHERE, return_type=result)
    def at(_, *where):
        word = ir.IntegerType.get_signless(32)
        text, constraints = "ld.relaxed.sys.global.u32 $0, [$1];", "=r,l,~{memory}"
        value = _assembly(word, [_pointer(where)], text, constraints)
        return gpu.FragmentedArray.splat(value, (), _SCALAR.to_mgpu(), is_signed=True)

    return at(*address)


def announce(value: Any, addresses: Sequence[Address]) -> None:
    """Puts an int32 to addresses, behind all that this warpgroup has stored anywhere."""

    def lines(count: int) -> list[str]:
        return ["fence.acq_rel.sys;", *(_ANNOUNCE.format(n + 1) for n in range(count))]

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *([_WHERE] * len(addresses))))
    def at(_, word, *places):
        gpu.warpgroup_barrier()
        _by_first_lane(word, places, lines(len(places)))

    at(value, *map(tuple, addresses))


def await_words(value: Any, addresses: Sequence[Address]) -> None:
    """Waits until each int32 at an address has counted up to a value; all may wrap around.

    What a peer has stored before it announced the value can be loaded then.
    """

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *([_WHERE] * len(addresses))))
    def at(_, word, *places):
        _by_first_lane(word, places, [_AWAIT.format(n + 1) for n in range(len(places))])
        gpu.warpgroup_barrier()

    at(value, *map(tuple, addresses))


def _by_first_lane(word: Any, places: Sequence[Any], lines: Sequence[str]) -> None:
    operands = [word.registers.item(), *(_pointer(place) for place in places)]
    constraints = ",".join(["r", *("l" for _ in places), "~{memory}"])
    _assembly(None, operands, _FIRST_LANE.format("\n".join(lines)), constraints)


def _assembly(result: Any, operands: list[Any], text: str, constraints: str) -> Any:
    return llvm.inline_asm(
        result, operands, text, constraints, has_side_effects=True, asm_dialect=0
    )


def _vectors(where: Any, count: int) -> list[Any]:
    """Where a lane's vectors of a contiguous array lie."""
    lane = arith.remui(gpu.thread_idx(), gpu.c(LANES, ir.IntegerType.get_signless(32)))
    i64 = ir.IntegerType.get_signless(64)
    first = arith.muli(arith.extui(i64, lane), gpu.c(VECTOR_BYTES, i64))
    rest = (gpu.c(number * LANES * VECTOR_BYTES, i64) for number in range(count))
    return [_pointer(where, arith.addi(first, behind)) for behind in rest]


def _pointer(where: Any, behind: Any = None) -> Any:
    """To what lies so many bytes, a 64-bit number, behind an address."""
    i64 = ir.IntegerType.get_signless(64)
    low, high, offset = (arith.extui(i64, word.registers.item()) for word in where)
    place = arith.addi(arith.ori(low, arith.shli(high, gpu.c(32, i64))), offset)
    if behind is not None:
        place = arith.addi(place, behind)
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), place)
