"""The loops of kernels that wait for a peer. They poll a word that the peer changes.

A peer that never comes would make them poll for ever. So a loop that has polled for longer than
`timeout_seconds` stores a report (see `timeout_reports`), and then to address 0, which ends the
program. It looks at the clock after each few thousand polls: a shorter wait never does.

It does not execute `trap`. That ends a thread, and ptxas no longer takes the lanes of a warp for
converged where one may have ended: each TMA copy would need more instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import (
    ADDRESS,
    SCALAR,
    Address,
    ThreadScope,
    inline_ptx,
    llvm_pointer,
    synchronize,
)
from collective_matmul.mosaic_gpu.peers.timeout_reports import (
    LINGER_SECONDS,
    OFFSETS,
    RECORD,
    timeout_seconds,
)

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

_WARP_LANES = 32

# A pointer and its epoch are one word: 48 bits of address, and above them the low 16 bits of the
# epoch. The word is stored and loaded whole, so no signal has to follow it.
ADDRESS_BITS = 48
#: Bytes of such a word.
POINTER_BYTES = 8

# How a word at $0 is loaded, and p: whether it is not yet what $1 says.
_COUNT_IS_LESS = """ld.relaxed.sys.global.u32 seen, [$0];
setp.lt.u32 p, seen, $1;"""
_TAG_DIFFERS = f"""ld.acquire.sys.global.b64 word, [$0];
shr.u64 word, word, {ADDRESS_BITS};
cvt.u32.u64 seen, word;
setp.ne.u32 p, seen, $1;"""

# $2 is the address of the device's report. One thread claims it; all wait until it has been read.
_POLL = """{{
.reg .pred p;
.reg .b32 seen, polls, claimed;
.reg .b64 word, now, since, record;
mov.b64 since, 0;
NEXT:
mov.b32 polls, 4096;
POLL:
{missing}
@!p bra DONE;
sub.u32 polls, polls, 1;
setp.ne.u32 p, polls, 0;
@p bra POLL;
mov.u64 now, %globaltimer;
setp.eq.u64 p, since, 0;
@p mov.b64 since, now;
sub.s64 now, now, since;
setp.lt.s64 p, now, {limit};
@p bra NEXT;
atom.relaxed.gpu.global.cas.b32 claimed, [$2], 0, 1;
setp.ne.u32 p, claimed, 0;
@p bra LINGER;
ld.global.b64 record, [$2 + {pointer}];
{stores}
fence.acq_rel.sys;
st.relaxed.sys.global.b32 [record + {written}], 1;
LINGER:
nanosleep.u32 1000000;
mov.u64 now, %globaltimer;
sub.s64 now, now, since;
setp.lt.s64 p, now, {end};
@p bra LINGER;
mov.b64 now, 0;
st.volatile.global.b32 [now], seen;
bra NEXT;
DONE:
}}"""
_POLL_FOR_EVER = """{{
.reg .pred p;
.reg .b32 seen;
.reg .b64 word;
POLL:
{missing}
@p bra POLL;
}}"""


class Awaited(NamedTuple):
    """The purpose of a wait, which is reported if it takes too long.

    Attributes:
      kernel: the name of the kernel.
      what: continues "waited for".
      report: the address of the report in this device's workspace, see `symmetric_workspace`.
    """

    kernel: str
    what: str
    report: Address


def wait_for_count(semaphore: Any, count: Any, scope: ThreadScope, awaited: Awaited) -> None:
    """Waits until a semaphore, which keeps its value, is at least `count`.

    Afterwards the threads see all that peers have stored before they signalled.

    Args:
      semaphore: a reference to an element of this device's array of semaphores.
      count: an int32 scalar.
      scope: the threads that call this.
      awaited: what it counts.
    """
    poll = polling(_COUNT_IS_LESS, awaited)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, ADDRESS))
    def at(_, semaphore, count, report):
        pointer = utils.memref_ptr(semaphore)
        with utils.single_thread(scope=scope):
            poll(pointer, count.registers.item(), report)
            inline_ptx(None, [], "fence.acquire.sys;")
        synchronize(scope)

    at(semaphore, jnp.int32(count), tuple(awaited.report))


def poll_pointers(
    epoch: Any,
    first: Address,
    stride: int,
    sources: int,
    arrays: int,
    scope: ThreadScope,
    awaited: Awaited,
) -> None:
    """Waits until all sources have published pointers of an epoch.

    Args:
      epoch: the epoch; its low 16 bits are compared.
      first: the mailbox of the first source.
      stride: bytes from one source's mailbox to the next one's.
      sources: the number of sources.
      arrays: the number of pointers that each of them publishes.
      scope: the threads that call this. Each lane of a warp polls one pointer.
      awaited: what the sources publish.
    """
    poll = polling(_TAG_DIFFERS, awaited)

    @plgpu.inline_mgpu(arg_types=(SCALAR, ADDRESS, ADDRESS))
    def at(_, epoch, first, report):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        lane = arith.remui(gpu.thread_idx(), gpu.c(_WARP_LANES, i32))
        tag = arith.andi(epoch.registers.item(), gpu.c((1 << 64 - ADDRESS_BITS) - 1, i32))
        for batch in range(-(-sources * arrays // _WARP_LANES)):
            word = arith.addi(lane, gpu.c(batch * _WARP_LANES, i32))
            word = arith.minui(word, gpu.c(sources * arrays - 1, i32))
            source, array = (f(word, gpu.c(arrays, i32)) for f in (arith.divui, arith.remui))
            offset = arith.addi(
                arith.muli(source, gpu.c(stride, i32)),
                arith.muli(array, gpu.c(POINTER_BYTES, i32)),
            )
            poll(llvm_pointer(first, arith.extui(i64, offset)), tag, report)
        synchronize(scope)

    at(epoch, tuple(first), tuple(awaited.report))


def polling(missing: str, awaited: Awaited) -> Any:
    """Returns ``poll(pointer, expected, report)``, which emits a loop of one thread or lane."""
    seconds = timeout_seconds()
    text = _poll_text(missing, awaited, seconds)

    def poll(pointer: Any, expected: Any, report: Any) -> None:
        operands = [pointer, expected, *([llvm_pointer(report)] if seconds else [])]
        inline_ptx(None, operands, text)

    return poll


def _poll_text(missing: str, awaited: Awaited, seconds: float) -> str:
    """Returns the PTX of a loop that ends when `missing` computes that p is false."""
    if not seconds:
        return _POLL_FOR_EVER.format(missing=missing)
    stores = [
        f"st.relaxed.sys.global.b32 [record + {OFFSETS['expected']}], $1;",
        f"st.relaxed.sys.global.b32 [record + {OFFSETS['seen']}], seen;",
    ]
    text = f"{awaited.kernel} waited {seconds:g} s for {awaited.what}".encode()
    size = RECORD["text"].itemsize
    assert len(text) <= size, text
    for start in range(0, len(text), 4):
        word = int.from_bytes(text[start : start + 4], "little")
        stores.append(f"st.relaxed.sys.global.b32 [record + {OFFSETS['text'] + start}], {word};")
    return _POLL.format(
        missing=missing,
        limit=int(seconds * 1e9),
        end=int((seconds + LINGER_SECONDS) * 1e9),
        pointer=symmetric_workspace.REPORT_POINTER_OFFSET,
        stores="\n".join(stores),
        written=OFFSETS["written"],
    )
