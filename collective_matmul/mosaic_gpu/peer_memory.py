"""Memory of any GPU of this process, as kernels reach it by its address.

XLA knows nothing of it: to its host, kernels that reach their peers in no other way are like any.
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

#: What kernels pass to assembly: an int32, and an `Address`; and what it returns, an int32.
SCALAR = plgpu.Layout.WG_SPLAT(())
ADDRESS = (SCALAR,) * 3
INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

#: Bytes that a lane of a warpgroup moves at once, and its lanes.
VECTOR_BYTES = 16
WARPGROUP_LANES = 128

#: Whose lanes run some code: a warpgroup's, or those of one of its warps.
ThreadScope = gpu.ThreadSubset
WARPGROUP, WARP = ThreadScope.WARPGROUP, ThreadScope.WARP

_SCOPE = """{{
.reg .pred p;
.reg .u32 word;
.reg .s32 ahead;
{}
}}"""
_STORE_INT32 = "st.relaxed.sys.global.u32 [${}], $0;"
_WAIT = """WAIT{0}:
ld.acquire.sys.global.u32 word, [${0}];
sub.s32 ahead, word, $0;
setp.lt.s32 p, ahead, 0;
@p bra WAIT{0};"""


class Address(NamedTuple):
    """Some bytes behind the place that a pair of words gives, all int32 scalars of a warpgroup."""

    low: Any
    high: Any
    offset: Any

    def plus(self, count: Any) -> Address:
        """So many bytes behind this."""
        return self._replace(offset=self.offset + count)


def layout(shape: tuple[int, ...], dtype: Any) -> Any:
    """Of what `load` and `store` move: every lane has vectors of neighbouring elements."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=VECTOR_BYTES // jnp.dtype(dtype).itemsize)


def load(address: Address, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array that lies at an address."""
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout(shape, dtype))

    @plgpu.inline_mgpu(arg_types=ADDRESS, return_type=result)
    def at(_, *where):
        elements = VECTOR_BYTES // jnp.dtype(dtype).itemsize
        vector = ir.VectorType.get((elements,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        count = math.prod(shape) // (WARPGROUP_LANES * elements)
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

    @plgpu.inline_mgpu(arg_types=(*ADDRESS, layout(value.shape, value.dtype)))
    def at(_, *where_and_value):
        *where, array = where_and_value
        vectors = array.registers.flat
        for vector, place in zip(vectors, _vectors(where, len(vectors)), strict=True):
            llvm.store(vector, place, alignment=VECTOR_BYTES)

    at(*address, value)


def load_int32(address: Address, *, cached: bool = False) -> jax.Array:
    """An int32 that lies at an address; of a settled one the multiprocessor may keep a copy."""
    how = "ld" if cached else "ld.relaxed.sys"

    @plgpu.inline_mgpu(arg_types=ADDRESS, return_type=INT32)
    def at(_, *where):
        i32 = ir.IntegerType.get_signless(32)
        return splat(inline_ptx(i32, [llvm_pointer(where)], f"{how}.global.u32 $0, [$1];"))

    return at(*address)


def store_int32(address: Address, value: Any, scope: ThreadScope) -> None:
    """Puts an int32 to an address, when all lanes have come here."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, ADDRESS))
    def at(_, word, where):
        synchronize(scope)
        _in_one_thread(scope, word, [where], [_STORE_INT32.format(1)])

    at(value, tuple(address))


def set_signals(value: Any, addresses: Sequence[Address]) -> None:
    """Raises flags, int32 at addresses, to a value, behind all that this warpgroup has stored."""

    def lines(count: int) -> list[str]:
        return ["fence.acq_rel.sys;", *(_STORE_INT32.format(n + 1) for n in range(count))]

    @plgpu.inline_mgpu(arg_types=(SCALAR, *([ADDRESS] * len(addresses))))
    def at(_, word, *places):
        synchronize(WARPGROUP)
        _in_one_thread(WARPGROUP, word, places, lines(len(places)))

    at(value, *map(tuple, addresses))


def wait_for_signals(value: Any, addresses: Sequence[Address]) -> None:
    """Waits until each flag, an int32 at an address, is counted up to a value; all may wrap around.

    What a peer has stored before it raised its flag to the value can be loaded then.
    """

    @plgpu.inline_mgpu(arg_types=(SCALAR, *([ADDRESS] * len(addresses))))
    def at(_, word, *places):
        _in_one_thread(WARPGROUP, word, places, [_WAIT.format(n + 1) for n in range(len(places))])
        synchronize(WARPGROUP)

    at(value, *map(tuple, addresses))


def synchronize(scope: ThreadScope) -> None:
    """Has all lanes wait for each other."""
    gpu.warpgroup_barrier() if scope == WARPGROUP else utils.warp_barrier()


def splat(word: Any) -> Any:
    """An int32 that all lanes have, as an array without dimensions."""
    return gpu.FragmentedArray.splat(word, (), SCALAR.to_mgpu(), is_signed=True)


def inline_ptx(result: Any, operands: list[Any], text: str) -> Any:
    """Assembly with side effects; what it makes, of type `result`, is $0 if it makes anything."""
    kinds = {"i1": "b", "i32": "r"}
    constraints = [kinds.get(str(operand.type), "l") for operand in operands]
    if result is not None:
        constraints.insert(0, "=" + kinds.get(str(result), "l"))
    return llvm.inline_asm(
        result,
        operands,
        text,
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )


def llvm_pointer(where: Any, behind: Any = None) -> Any:
    """To what lies so many bytes, a 64-bit number, behind an address."""
    i64 = ir.IntegerType.get_signless(64)
    low, high, offset = (arith.extui(i64, word.registers.item()) for word in where)
    place = arith.addi(arith.ori(low, arith.shli(high, gpu.c(32, i64))), offset)
    if behind is not None:
        place = arith.addi(place, behind)
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), place)


def _in_one_thread(
    scope: ThreadScope, word: Any, places: Sequence[Any], lines: Sequence[str]
) -> None:
    """Runs lines of assembly in one lane: $0 is a word, from $1 on are places."""
    operands = [word.registers.item(), *(llvm_pointer(place) for place in places)]
    with utils.single_thread(scope=scope):
        inline_ptx(None, operands, _SCOPE.format("\n".join(lines)))


def _vectors(where: Any, count: int) -> list[Any]:
    """Where a lane's vectors of a contiguous array lie."""
    lane = arith.remui(gpu.thread_idx(), gpu.c(WARPGROUP_LANES, ir.IntegerType.get_signless(32)))
    i64 = ir.IntegerType.get_signless(64)
    first = arith.muli(arith.extui(i64, lane), gpu.c(VECTOR_BYTES, i64))
    rest = (gpu.c(number * WARPGROUP_LANES * VECTOR_BYTES, i64) for number in range(count))
    return [llvm_pointer(where, arith.addi(first, behind)) for behind in rest]
