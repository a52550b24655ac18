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

from collective_matmul.mosaic_gpu import workspace
from collective_matmul.mosaic_gpu.peer_memory import (
    SCALAR,
    WARPGROUP,
    WHERE,
    WORD,
    Address,
    Lanes,
    assembly,
    load_word,
    pointer,
    splat,
    store_word,
    synchronize,
)
from collective_matmul.mosaic_gpu.remote_store import Twin

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

# An address, and when it is said, are one word, which is stored and loaded whole: no flag needs to
# be raised behind it. Addresses have 48 bits.
_ADDRESS_BITS = 48
#: Of such a word.
SAID_BYTES = 8
# Of a warp: each listens to its own word.
_WARP_LANES = 32
_HEAR = """{
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
MOST_ARRAYS = 3
# Behind what a device says to itself in the first slot: the block's own epoch.
_COUNTER_OFFSET = MOST_ARRAYS * SAID_BYTES


class Peers:
    """The devices of a mesh axis, as one block of a kernel knows them.

    `announce` and `await_all` are called by one warp or warpgroup of the block, and `twin` by any
    that knows that it has had all peers come.
    """

    def __init__(self, words: Any, devices: int, block: tuple[Any, int], arrays: Sequence[Any]):
        """Of a block, its number and how many there are.

        Peers store to the arrays, at most `MOST_ARRAYS`; words are as of `workspace.addresses`.
        """
        self.block, blocks = block
        assert blocks <= workspace.MEETING_BLOCKS and len(arrays) <= MOST_ARRAYS
        self.devices = devices
        self.arrays = list(arrays)
        self._words = words
        self._epoch: Any = None

    # Words are loaded where they are needed: those that multiply have no registers to keep them in.

    @property
    def me(self) -> Any:
        """This device's index along the axis."""
        return self._words[2 * self.devices]

    def _space(self, offset: int) -> Address:
        """The workspace of the device so far along the axis."""
        return Address(self._words[2 * offset], self._words[2 * offset + 1], 0)

    def announce(self, lanes: Lanes = WARPGROUP) -> None:
        """Tells all peers that this device has come, and where its arrays are."""
        self._epoch = epoch = load_word(self._counter) + 1
        # As another device counts, from itself on, this one is so far away.
        places = [
            self._said(self._space(offset), epoch, -offset % self.devices)
            for offset in range(self.devices)
        ]
        arrays = [*self.arrays, *[self.arrays[-1]] * (MOST_ARRAYS - len(self.arrays))]
        say(epoch, arrays, places, lanes)
        store_word(self._counter, epoch, lanes)

    def await_all(self, lanes: Lanes = WARPGROUP) -> None:
        """Waits until all peers have come; `announce` must have been called."""
        first = self._said(self._space(0), self._epoch, 1)
        between = workspace.meeting_offset(self.devices, 0, 1, 0)
        between -= workspace.meeting_offset(self.devices, 0, 0, 0)
        hear(self._epoch, first, between, self.devices - 1, len(self.arrays), lanes)

    def twin(self, number: int, offset: Any) -> Twin:
        """Of an array, by its number, on the device so far along the axis; 0 is this one."""
        place = self._said(self._space(0), load_word(self._counter, settled=True), offset)
        return Twin(self.arrays[number], load_said(place.behind(number * SAID_BYTES)))

    def index(self, offset: Any) -> Any:
        """Of the device so far along the axis."""
        return lax.rem(self.me + offset, self.devices)

    @property
    def _counter(self) -> Address:
        line = workspace.meeting_offset(self.devices, 0, 0, self.block)
        return self._space(0).behind(line + _COUNTER_OFFSET)

    def _said(self, space: Address, epoch: Any, source: Any) -> Address:
        """Where a source leaves what it says."""
        slot = epoch & (workspace.SLOTS - 1)
        return space.behind(workspace.meeting_offset(self.devices, slot, source, self.block))


def say(value: Any, arrays: Sequence[Any], addresses: Sequence[Address], lanes: Lanes) -> None:
    """Puts where arrays are, a word for each, with the low 16 bits of an int32, to addresses."""

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, [plgpu.RefType()] * len(arrays), [WHERE] * len(addresses))
    )
    def at(_, value, arrays, places):
        i64 = ir.IntegerType.get_signless(64)
        when = arith.extui(i64, value.registers.item())
        when = arith.shli(when, gpu.c(_ADDRESS_BITS, i64))
        words = [arith.ori(llvm.ptrtoint(i64, utils.memref_ptr(array)), when) for array in arrays]
        with utils.single_thread(scope=lanes):
            assembly(None, [], "fence.acq_rel.sys;")
            for place, (number, word) in itertools.product(places, enumerate(words)):
                there = pointer(place, gpu.c(number * SAID_BYTES, i64))
                assembly(None, [there, word], "st.relaxed.sys.global.b64 [$0], $1;")

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

    @plgpu.inline_mgpu(arg_types=(SCALAR, WHERE))
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
            place = pointer(where, arith.extui(i64, behind))
            assembly(None, [place, arith.extui(i64, when)], _HEAR % _ADDRESS_BITS)
        synchronize(lanes)

    at(value, tuple(first))


def load_said(place: Address) -> Address:
    """The address that was said at a place, and heard by this block."""

    @plgpu.inline_mgpu(arg_types=(WHERE,), return_type=(WORD, WORD))
    def at(_, where):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        said = assembly(i64, [pointer(where)], "ld.global.b64 $0, [$1];")
        address = arith.andi(said, gpu.c((1 << _ADDRESS_BITS) - 1, i64))
        high = arith.shrui(address, gpu.c(32, i64))
        return splat(arith.trunci(i32, address)), splat(arith.trunci(i32, high))

    low, high = at(tuple(place))
    return Address(low, high, 0)
