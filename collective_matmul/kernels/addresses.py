"""Memory of any GPU of this process, as kernels reach it by its address.

XLA knows nothing of it: to its host, kernels that reach their peers in no other way are like any.
"""

from __future__ import annotations

import itertools
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
_WORD = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

#: Bytes that a lane of a warpgroup moves at once, and its lanes.
VECTOR_BYTES = 16
LANES = 128
_WARP_LANES = 32

#: Whose lanes run some code: a warpgroup's, or those of one of its warps.
Lanes = gpu.ThreadSubset
WARPGROUP, WARP = Lanes.WARPGROUP, Lanes.WARP

_SCOPE = """{{
.reg .pred p;
.reg .u32 word;
.reg .s32 ahead;
{}
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


def load_word(address: Address, *, settled: bool = False) -> jax.Array:
    """An int32 that lies at an address; of a settled one the multiprocessor may keep a copy."""
    how = "ld" if settled else "ld.relaxed.sys"

    @plgpu.inline_mgpu(arg_types=_WHERE, return_type=_WORD)
    def at(_, *where):
        i32 = ir.IntegerType.get_signless(32)
        return _splat(_assembly(i32, [_pointer(where)], f"{how}.global.u32 $0, [$1];"))

    return at(*address)


def store_word(address: Address, value: Any, lanes: Lanes) -> None:
    """Puts an int32 to an address, when all lanes have come here."""

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _WHERE))
    def at(_, word, where):
        _meet(lanes)
        _by_one(lanes, word, [where], [_ANNOUNCE.format(1)])

    at(value, tuple(address))


def announce(value: Any, addresses: Sequence[Address]) -> None:
    """Puts an int32 to addresses, behind all that this warpgroup has stored anywhere."""

    def lines(count: int) -> list[str]:
        return ["fence.acq_rel.sys;", *(_ANNOUNCE.format(n + 1) for n in range(count))]

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *([_WHERE] * len(addresses))))
    def at(_, word, *places):
        _meet(WARPGROUP)
        _by_one(WARPGROUP, word, places, lines(len(places)))

    at(value, *map(tuple, addresses))


def await_words(value: Any, addresses: Sequence[Address]) -> None:
    """Waits until each int32 at an address has counted up to a value; all may wrap around.

    What a peer has stored before it announced the value can be loaded then.
    """

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *([_WHERE] * len(addresses))))
    def at(_, word, *places):
        _by_one(WARPGROUP, word, places, [_AWAIT.format(n + 1) for n in range(len(places))])
        _meet(WARPGROUP)

    at(value, *map(tuple, addresses))


# An address, and when it is said, are one word, which is stored and loaded whole: nothing needs to
# be announced behind it. Addresses have 48 bits.
_ADDRESS_BITS = 48
#: Of such a word.
SAID_BYTES = 8
_HEAR = """{
.reg .pred p;
.reg .b64 word;
HEAR:
ld.acquire.sys.global.b64 word, [$0];
shr.u64 word, word, %d;
setp.ne.u64 p, word, $1;
@p bra HEAR;
}"""


def say(value: Any, arrays: Sequence[Any], addresses: Sequence[Address], lanes: Lanes) -> None:
    """Puts where arrays are, a word for each, with the low 16 bits of an int32, to addresses."""

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, [plgpu.RefType()] * len(arrays), [_WHERE] * len(addresses))
    )
    def at(_, value, arrays, places):
        i64 = ir.IntegerType.get_signless(64)
        when = arith.extui(i64, value.registers.item())
        when = arith.shli(when, gpu.c(_ADDRESS_BITS, i64))
        words = [arith.ori(llvm.ptrtoint(i64, utils.memref_ptr(array)), when) for array in arrays]
        with utils.single_thread(scope=lanes):
            _assembly(None, [], "fence.acq_rel.sys;")
            for place, (number, word) in itertools.product(places, enumerate(words)):
                there = _pointer(place, gpu.c(number * SAID_BYTES, i64))
                _assembly(None, [there, word], "st.relaxed.sys.global.b64 [$0], $1;")

    at(value, list(arrays), [tuple(address) for address in addresses])


def hear(value: Any, first: Address, between: int, count: int, arrays: int, lanes: Lanes) -> None:
    """Waits until others have said where so many arrays are, with the low 16 bits of an int32.

    Args:
      value: that they say.
      first: where the first of them says it.
      between: bytes to where the next one does.
      count: of others.
      arrays: of each.
      lanes: that call this. Each lane of a warp listens to one word.
    """

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _WHERE))
    def at(_, value, where):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        lane = arith.remui(gpu.thread_idx(), gpu.c(_WARP_LANES, i32))
        when = arith.andi(value.registers.item(), gpu.c((1 << 64 - _ADDRESS_BITS) - 1, i32))
        for turn in range(-(-count * arrays // _WARP_LANES)):
            word = arith.addi(lane, gpu.c(turn * _WARP_LANES, i32))
            word = arith.minui(word, gpu.c(count * arrays - 1, i32))
            who, which = (f(word, gpu.c(arrays, i32)) for f in (arith.divui, arith.remui))
            behind = arith.addi(
                arith.muli(who, gpu.c(between, i32)), arith.muli(which, gpu.c(SAID_BYTES, i32))
            )
            place = _pointer(where, arith.extui(i64, behind))
            _assembly(None, [place, arith.extui(i64, when)], _HEAR % _ADDRESS_BITS)
        _meet(lanes)

    at(value, tuple(first))


def load_said(place: Address) -> Address:
    """The address that was said at a place, and heard by this block."""

    @plgpu.inline_mgpu(arg_types=(_WHERE,), return_type=(_WORD, _WORD))
    def at(_, where):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        said = _assembly(i64, [_pointer(where)], "ld.global.b64 $0, [$1];")
        address = arith.andi(said, gpu.c((1 << _ADDRESS_BITS) - 1, i64))
        high = arith.shrui(address, gpu.c(32, i64))
        return _splat(arith.trunci(i32, address)), _splat(arith.trunci(i32, high))

    low, high = at(tuple(place))
    return Address(low, high, 0)


class Twin(NamedTuple):
    """An array of this device, and where its twin lies, the array that a peer has in its place."""

    array: Any
    address: Address


_TWIN = (plgpu.RefType(), _WHERE)


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
    types = (plgpu.RefType(), plgpu.RefType(), _TWIN, *[_SCALAR] * len(wanted))

    @plgpu.inline_mgpu(arg_types=types)
    def at(_, box, place, twin, *wanted):
        chosen = utils.single_thread_predicate(lanes)
        for condition in wanted:
            chosen = arith.andi(chosen, condition.registers.item())
        kind = ir.MemRefType(box.type)
        size = math.prod(kind.shape) * utils.bytewidth(kind.element_type)
        size = gpu.c(size, ir.IntegerType.get_signless(32))
        operands = [chosen, _in_twin(place, *twin), utils.memref_ptr(box), size]
        _assembly(None, operands, "@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;")

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
        _meet(lanes)
        chosen = utils.single_thread_predicate(lanes)
        # One fence for all: it takes as long as a message on its way.
        _assembly(None, [chosen], "@$0 fence.acq_rel.sys;")
        for twin in twins:
            operands = [chosen, _in_twin(word, *twin)]
            _assembly(None, operands, "@$0 red.relaxed.sys.global.add.u32 [$1], 1;")

    at(word, [(twin.array, tuple(twin.address)) for twin in twins])


def _in_twin(place: Any, array: Any, where: Any) -> Any:
    """To the part of an array's twin that is such a place of the array."""
    i64 = ir.IntegerType.get_signless(64)
    here, start = (llvm.ptrtoint(i64, utils.memref_ptr(part)) for part in (place, array))
    return _pointer(where, arith.subi(here, start))


def _meet(lanes: Lanes) -> None:
    """Has all lanes wait for each other."""
    gpu.warpgroup_barrier() if lanes == WARPGROUP else utils.warp_barrier()


def _by_one(lanes: Lanes, word: Any, places: Sequence[Any], lines: Sequence[str]) -> None:
    """Runs lines of assembly in one lane: $0 is a word, from $1 on are places."""
    operands = [word.registers.item(), *(_pointer(place) for place in places)]
    with utils.single_thread(scope=lanes):
        _assembly(None, operands, _SCOPE.format("\n".join(lines)))


def _splat(word: Any) -> Any:
    """An int32 that all lanes have, as an array without dimensions."""
    return gpu.FragmentedArray.splat(word, (), _SCALAR.to_mgpu(), is_signed=True)


def _assembly(result: Any, operands: list[Any], text: str) -> Any:
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
