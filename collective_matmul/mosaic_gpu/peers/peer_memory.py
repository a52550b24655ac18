"""Loads and stores at raw addresses: how kernels access the memory of other GPUs.

All GPUs of one process share an address space, and peer access lets each of them load from and
store to the memory of the others. Processes map each other's memory: see `shared_memory`.

XLA is not involved: it sees ordinary kernels. So the memory model of PTX is all there is to rely
on: a store is visible to a peer when the peer has acquired, at scope `sys`, what was released after
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

#: Types of arguments of inline code, an int32 scalar and an `Address`; and of an int32 result.
SCALAR = plgpu.Layout.WG_SPLAT(())
ADDRESS = (SCALAR,) * 3
INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

#: Bytes that one lane moves with one instruction.
VECTOR_BYTES = 16
#: Lanes (threads) of a warpgroup.
WARPGROUP_LANES = 128

#: The threads that execute a piece of code together: a warpgroup, or one of its warps.
ThreadScope = gpu.ThreadSubset
WARPGROUP, WARP = ThreadScope.WARPGROUP, ThreadScope.WARP


class Address(NamedTuple):
    """An address in the memory of any GPU: a 64-bit base in two words, and an offset in bytes.

    Pallas has no 64-bit scalars, so all three are int32 scalars of a warpgroup.
    """

    low: Any
    high: Any
    offset: Any

    def plus(self, count: Any) -> Address:
        """Returns the address `count` bytes further."""
        return self._replace(offset=self.offset + count)


def layout(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the register layout of messages: each lane has vectors of 16 bytes."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=VECTOR_BYTES // jnp.dtype(dtype).itemsize)


def load_int32(address: Address, *, cached: bool = False) -> jax.Array:
    """Returns the int32 at an address.

    Args:
      address: of the int32.
      cached: whether the load may hit the L1 cache. For words that do not change any more while
        this kernel runs.
    """
    how = "ld" if cached else "ld.relaxed.sys"

    @plgpu.inline_mgpu(arg_types=ADDRESS, return_type=INT32)
    def at(_, *words):
        i32 = ir.IntegerType.get_signless(32)
        return splat(inline_ptx(i32, [llvm_pointer(words)], f"{how}.global.u32 $0, [$1];"))

    return at(*address)


def store_int32(address: Address, value: Any, scope: ThreadScope) -> None:
    """Stores an int32 at an address, after all threads of the scope have arrived here."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, ADDRESS))
    def at(_, value, words):
        synchronize(scope)
        operands = [llvm_pointer(words), value.registers.item()]
        with utils.single_thread(scope=scope):
            inline_ptx(None, operands, "st.relaxed.sys.global.u32 [$0], $1;")

    at(value, tuple(address))


# What inline code consists of. Arguments are MLIR values here.


def synchronize(scope: ThreadScope) -> None:
    """Makes all threads of the scope wait for each other."""
    gpu.warpgroup_barrier() if scope == WARPGROUP else utils.warp_barrier()


def splat(word: Any) -> Any:
    """Returns an int32 that is the same in all lanes as an array without dimensions."""
    return gpu.FragmentedArray.splat(word, (), SCALAR.to_mgpu(), is_signed=True)


def inline_ptx(result: Any, operands: list[Any], text: str) -> Any:
    """Emits PTX with side effects.

    Args:
      result: the type of the result, which is $0 in the text; None if there is none.
      operands: the next numbers in the text.
      text: PTX.

    Returns:
      The result.
    """
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


def llvm_pointer(words: Any, byte_offset: Any = None) -> Any:
    """Returns the pointer to an `Address`, plus a 64-bit number of bytes if given."""
    i64 = ir.IntegerType.get_signless(64)
    low, high, offset = (arith.extui(i64, word.registers.item()) for word in words)
    address = arith.addi(arith.ori(low, arith.shli(high, gpu.c(32, i64))), offset)
    if byte_offset is not None:
        address = arith.addi(address, byte_offset)
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)


def lane_pointers(words: Any, count: int) -> list[Any]:
    """Returns the pointers to a lane's `count` vectors of a contiguous array at an `Address`."""
    lane = arith.remui(gpu.thread_idx(), gpu.c(WARPGROUP_LANES, ir.IntegerType.get_signless(32)))
    i64 = ir.IntegerType.get_signless(64)
    first = arith.muli(arith.extui(i64, lane), gpu.c(VECTOR_BYTES, i64))
    offsets = (gpu.c(number * WARPGROUP_LANES * VECTOR_BYTES, i64) for number in range(count))
    return [llvm_pointer(words, arith.addi(first, offset)) for offset in offsets]
