"""How blocks of a kernel meet those of the same number on other devices, and reach their memory.

Arrays of a launch lie elsewhere on every device, and nobody may store to a peer's before it has
come to the launch: what was there may still be needed. So every block tells its counterparts where
they are:

1. Count the meeting: the block's epoch. It alternates between two slots of the workspaces.
2. Leave the addresses of the arrays in each peer's workspace, and with each the epoch.
3. Wait, before anything is stored to peers, until all of them have left theirs here.

XLA keeps an array until its kernel ends, so no kernel may end before all has arrived that peers
store there, something from each. So nobody can be two launches ahead of a peer, and whoever leaves
something in a slot has heard from all peers that they ended the launch before the last. A block
takes part in a meeting on all devices or on none; one that stores nothing need not wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from collective_matmul.mosaic_gpu import symmetric_workspace
from collective_matmul.mosaic_gpu.peer_memory import (
    ADDRESS,
    INT32,
    SCALAR,
    WARPGROUP,
    Address,
    ThreadScope,
    inline_ptx,
    llvm_pointer,
    load_int32,
    splat,
    store_int32,
    synchronize,
)
from collective_matmul.mosaic_gpu.remote_store import PeerBuffer

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# An address, and when it is said, are one word, which is stored and loaded whole: no flag needs to
# be raised behind it. Addresses have 48 bits.
_ADDRESS_BITS = 48
#: Of such a word.
POINTER_BYTES = 8
# Of a warp: each listens to its own word.
_WARP_LANES = 32
_POLL_PTX = """{
.reg .pred p;
.reg .b64 word;
HEAR:
ld.acquire.sys.global.b64 word, [$0];
shr.u64 word, word, %d;
setp.ne.u64 p, word, $1;
@p bra HEAR;
}"""

# So many words are said at every meeting, or old ones could be mistaken for new ones when the part
# of the epoch that they have comes round.
MAX_BUFFERS = 3
# Behind what a device says to itself in the first slot: the block's own epoch.
_EPOCH_OFFSET = MAX_BUFFERS * POINTER_BYTES


class Rendezvous:
    """The devices of a mesh axis, as one block of a kernel knows them.

    `publish` and `wait_for_peers` are called by one warp or warpgroup of the block, and `peer_buffer` by any
    that knows that it has had all peers come.
    """

    def __init__(self, words: Any, devices: int, block: tuple[Any, int], arrays: Sequence[Any]):
        """Of a block, its number and how many there are.

        Peers store to the arrays, at most `MAX_BUFFERS`; words are as of `symmetric_workspace.workspace_pointers`.
        """
        self.block, blocks = block
        assert blocks <= symmetric_workspace.RENDEZVOUS_BLOCKS and len(arrays) <= MAX_BUFFERS
        self.devices = devices
        self.arrays = list(arrays)
        self._words = words
        self._epoch: Any = None

    # Words are loaded where they are needed: those that multiply have no registers to keep them in.

    @property
    def axis_index(self) -> Any:
        """This device's index along the axis."""
        return self._words[2 * self.devices]

    def _workspace(self, offset: int) -> Address:
        """The workspace of the device so far along the axis."""
        return Address(self._words[2 * offset], self._words[2 * offset + 1], 0)

    def publish(self, scope: ThreadScope = WARPGROUP) -> None:
        """Tells all peers that this device has come, and where its arrays are."""
        self._epoch = epoch = load_int32(self._epoch_counter) + 1
        # As another device counts, from itself on, this one is so far away.
        places = [
            self._mailbox(self._workspace(offset), epoch, -offset % self.devices)
            for offset in range(self.devices)
        ]
        arrays = [*self.arrays, *[self.arrays[-1]] * (MAX_BUFFERS - len(self.arrays))]
        publish_pointers(epoch, arrays, places, scope)
        store_int32(self._epoch_counter, epoch, scope)

    def wait_for_peers(self, scope: ThreadScope = WARPGROUP) -> None:
        """Waits until all peers have come; `publish` must have been called."""
        first = self._mailbox(self._workspace(0), self._epoch, 1)
        between = symmetric_workspace.mailbox_offset(self.devices, 0, 1, 0)
        between -= symmetric_workspace.mailbox_offset(self.devices, 0, 0, 0)
        poll_pointers(self._epoch, first, between, self.devices - 1, len(self.arrays), scope)

    def peer_buffer(self, number: int, offset: Any) -> PeerBuffer:
        """Of an array, by its number, on the device so far along the axis; 0 is this one."""
        place = self._mailbox(
            self._workspace(0), load_int32(self._epoch_counter, cached=True), offset
        )
        return PeerBuffer(
            self.arrays[number], load_peer_pointer(place.plus(number * POINTER_BYTES))
        )

    def peer_index(self, offset: Any) -> Any:
        """Of the device so far along the axis."""
        return lax.rem(self.axis_index + offset, self.devices)

    @property
    def _epoch_counter(self) -> Address:
        line = symmetric_workspace.mailbox_offset(self.devices, 0, 0, self.block)
        return self._workspace(0).plus(line + _EPOCH_OFFSET)

    def _mailbox(self, space: Address, epoch: Any, source: Any) -> Address:
        """Where a source leaves what it says."""
        slot = epoch & (symmetric_workspace.SLOTS - 1)
        return space.plus(
            symmetric_workspace.mailbox_offset(self.devices, slot, source, self.block)
        )


def publish_pointers(
    value: Any, arrays: Sequence[Any], addresses: Sequence[Address], scope: ThreadScope
) -> None:
    """Puts where arrays are, a word for each, with the low 16 bits of an int32, to addresses."""

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, [plgpu.RefType()] * len(arrays), [ADDRESS] * len(addresses))
    )
    def at(_, value, arrays, places):
        i64 = ir.IntegerType.get_signless(64)
        when = arith.extui(i64, value.registers.item())
        when = arith.shli(when, gpu.c(_ADDRESS_BITS, i64))
        words = [arith.ori(llvm.ptrtoint(i64, utils.memref_ptr(array)), when) for array in arrays]
        with utils.single_thread(scope=scope):
            inline_ptx(None, [], "fence.acq_rel.sys;")
            for place, (number, word) in itertools.product(places, enumerate(words)):
                there = llvm_pointer(place, gpu.c(number * POINTER_BYTES, i64))
                inline_ptx(None, [there, word], "st.relaxed.sys.global.b64 [$0], $1;")

    at(value, list(arrays), [tuple(address) for address in addresses])


def poll_pointers(
    value: Any, first: Address, between: int, count: int, arrays: int, scope: ThreadScope
) -> None:
    """Waits until others have said where so many arrays are, with the low 16 bits of an int32.

    Args:
      value: that they say.
      first: where the first of them says it.
      between: bytes to where the next one does.
      count: of others.
      arrays: of each.
      scope: that call this. Each lane of a warp listens to one word.
    """

    @plgpu.inline_mgpu(arg_types=(SCALAR, ADDRESS))
    def at(_, value, where):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        lane = arith.remui(gpu.thread_idx(), gpu.c(_WARP_LANES, i32))
        when = arith.andi(value.registers.item(), gpu.c((1 << 64 - _ADDRESS_BITS) - 1, i32))
        for turn in range(-(-count * arrays // _WARP_LANES)):
            word = arith.addi(lane, gpu.c(turn * _WARP_LANES, i32))
            word = arith.minui(word, gpu.c(count * arrays - 1, i32))
            who, which = (f(word, gpu.c(arrays, i32)) for f in (arith.divui, arith.remui))
            behind = arith.addi(
                arith.muli(who, gpu.c(between, i32)), arith.muli(which, gpu.c(POINTER_BYTES, i32))
            )
            place = llvm_pointer(where, arith.extui(i64, behind))
            inline_ptx(None, [place, arith.extui(i64, when)], _POLL_PTX % _ADDRESS_BITS)
        synchronize(scope)

    at(value, tuple(first))


def load_peer_pointer(place: Address) -> Address:
    """The address that was said at a place, and heard by this block."""

    @plgpu.inline_mgpu(arg_types=(ADDRESS,), return_type=(INT32, INT32))
    def at(_, where):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        said = inline_ptx(i64, [llvm_pointer(where)], "ld.global.b64 $0, [$1];")
        address = arith.andi(said, gpu.c((1 << _ADDRESS_BITS) - 1, i64))
        high = arith.shrui(address, gpu.c(32, i64))
        return splat(arith.trunci(i32, address)), splat(arith.trunci(i32, high))

    low, high = at(tuple(place))
    return Address(low, high, 0)
