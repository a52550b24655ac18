"""The rendezvous of a launch: blocks tell their counterparts on peers where their arrays are.

XLA places the arrays of a launch at different addresses on every device. And a device must not
store to a peer before the peer has entered the same launch: until then the memory may still be in
use for something else. A rendezvous solves both. Every block, together with the blocks of the same
number on the other devices:

1. counts its epoch, which numbers the rendezvous of this block;
2. *publishes*: it stores the addresses of its arrays, tagged with the epoch, in the mailbox that
   each peer's symmetric workspace has for it;
3. *waits for peers*, before it stores anything to them: it polls its own mailboxes until each of
   them holds addresses of this epoch.

Publishing does not wait. Two phases of mailboxes, used by odd and by even epochs, are enough:

- XLA keeps the arrays of a kernel until the kernel ends. So no kernel may end before everything
  that peers store to its arrays has arrived. Every kernel that uses a rendezvous receives something
  from each peer, so it ends only after each peer has entered the same launch.
- So nobody is two launches ahead of a peer. Who publishes epoch e overwrites what it published in
  epoch e - 2, and all peers have ended that launch: it has ended launch e - 1, hence all peers had
  entered e - 1, and ended e - 2.

In several processes, peers find an array at another address than its own device. It publishes that
one: its own plus a constant, see `shared_memory`.

A block takes part in a rendezvous on all devices or on none, so that epochs agree. A block that
stores nothing to peers need not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import (
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
)
from collective_matmul.mosaic_gpu.peers.peer_waits import (
    ADDRESS_BITS,
    POINTER_BYTES,
    Awaited,
    poll_pointers,
    wait_for_count,
)
from collective_matmul.mosaic_gpu.peers.remote_store import PeerBuffer

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

#: The largest number of arrays that peers store to. Every rendezvous publishes this many pointers,
#: the last of them repeatedly if there are fewer: a word that was skipped would keep an old epoch,
#: which is taken for a new one when the 16 bits of the epoch have wrapped around.
MAX_BUFFERS = 3
# The block's epoch is stored after the pointers that the device publishes to itself in phase 0.
_EPOCH_OFFSET = MAX_BUFFERS * POINTER_BYTES


class Rendezvous:
    """One block's rendezvous with the blocks of the same number on all devices of a mesh axis.

    Devices are named by their offset: the one at offset s is s places after this one along the
    axis, and offset 0 is this device.

    One warp or warpgroup of the block calls `publish` and `wait_for_peers`. After that,
    `peer_buffer` is for all warps that have been told so by a barrier.
    """

    def __init__(
        self,
        workspace_pointers: Any,
        devices: int,
        block: tuple[Any, int],
        arrays: Sequence[Any],
        kernel: str,
    ):
        """Describes the rendezvous; nothing is stored yet.

        Args:
          workspace_pointers: see `symmetric_workspace.workspace_pointers`.
          devices: the size of the axis.
          block: the index of this block, and the number of blocks of the kernel.
          arrays: the arrays that peers store to, at most `MAX_BUFFERS`.
          kernel: the name of the kernel, for reports of waits that take too long.
        """
        self.block, blocks = block
        assert blocks <= symmetric_workspace.RENDEZVOUS_BLOCKS and len(arrays) <= MAX_BUFFERS
        self.kernel = kernel
        self.devices = devices
        self.arrays = list(arrays)
        self._workspace_pointers = workspace_pointers
        self._epoch: Any = None

    # Scalars are loaded where they are needed, here and below: the warpgroups that multiply have no
    # registers to keep them in.

    @property
    def axis_index(self) -> Any:
        """The index of this device along the axis."""
        return self._workspace_pointers[2 * self.devices]

    def peer_index(self, offset: Any) -> Any:
        """Returns the index along the axis of the device at an offset."""
        return lax.rem(self.axis_index + offset, self.devices)

    def publish(self, scope: ThreadScope = WARPGROUP) -> None:
        """Tells all peers that this device has entered the launch, and where its arrays are."""
        self._epoch = epoch = load_int32(self._epoch_counter) + 1
        # For the device at `offset`, this device is the source at -offset.
        mailboxes = [
            self._mailbox(self._workspace(offset), epoch, -offset % self.devices)
            for offset in range(self.devices)
        ]
        arrays = [*self.arrays, *[self.arrays[-1]] * (MAX_BUFFERS - len(self.arrays))]
        publish_pointers(epoch, arrays, mailboxes, scope, self._translation)
        store_int32(self._epoch_counter, epoch, scope)

    def wait_for_peers(self, scope: ThreadScope = WARPGROUP) -> None:
        """Waits until all peers have published. Requires that `publish` was called."""
        first = self._mailbox(self._workspace(0), self._epoch, 1)
        stride = symmetric_workspace.mailbox_offset(self.devices, 0, 1, 0)
        stride -= symmetric_workspace.mailbox_offset(self.devices, 0, 0, 0)
        sources, awaited = self.devices - 1, self._awaited("peers to launch it")
        poll_pointers(self._epoch, first, stride, sources, len(self.arrays), scope, awaited)

    def wait_for_count(
        self, semaphore: Any, count: Any, what: str, scope: ThreadScope = WARPGROUP
    ) -> None:
        """Waits until peers have signalled a semaphore, which keeps its value, `count` times.

        Args:
          semaphore: a reference to an element of this device's array of semaphores.
          count: a scalar.
          what: what is counted, in the plural, for the report of a wait that takes too long.
          scope: the threads that call this.
        """
        wait_for_count(semaphore, count, scope, self._awaited(what))

    def peer_buffer(self, number: int, offset: Any) -> PeerBuffer:
        """Returns the peer buffer of an array, by its number, on the device at an offset."""
        workspace = self._workspace(0)
        # The epoch does not change between `publish` and the end of the kernel.
        epoch = load_int32(self._epoch_counter, cached=True)
        mailbox = self._mailbox(workspace, epoch, offset)
        address = load_peer_pointer(mailbox.plus(number * POINTER_BYTES))
        return PeerBuffer(self.arrays[number], address)

    def _workspace(self, offset: int) -> Address:
        """Returns the address of the workspace of the device at an offset."""
        pointers = self._workspace_pointers
        return Address(pointers[2 * offset], pointers[2 * offset + 1], 0)

    def _awaited(self, what: str) -> Awaited:
        report = self._workspace(0).plus(symmetric_workspace.report_offset(self.devices))
        return Awaited(self.kernel, what, report)

    @property
    def _translation(self) -> Address | None:
        """The difference between an address here and the one for peers; None in one process."""
        if jax.process_count() == 1:
            return None
        low, high = (self._workspace_pointers[2 * self.devices + word] for word in (1, 2))
        return Address(low, high, 0)

    @property
    def _epoch_counter(self) -> Address:
        mailbox = symmetric_workspace.mailbox_offset(self.devices, 0, 0, self.block)
        return self._workspace(0).plus(mailbox + _EPOCH_OFFSET)

    def _mailbox(self, workspace: Address, epoch: Any, source: Any) -> Address:
        """Returns the address of the mailbox that a source publishes to in a workspace."""
        phase = epoch & (symmetric_workspace.PHASES - 1)
        offset = symmetric_workspace.mailbox_offset(self.devices, phase, source, self.block)
        return workspace.plus(offset)


def publish_pointers(
    epoch: Any,
    arrays: Sequence[Any],
    mailboxes: Sequence[Address],
    scope: ThreadScope,
    translation: Address | None = None,
) -> None:
    """Stores the pointers of arrays, tagged with the low 16 bits of an epoch, in each mailbox.

    Args:
      epoch: the epoch.
      arrays: this device's arrays.
      mailboxes: the first is in this device's own workspace.
      scope: the threads that call this.
      translation: what is added to the pointers in all mailboxes but the first.
    """
    translations = [] if translation is None else [tuple(translation)]
    lists = (
        [plgpu.RefType()] * len(arrays),
        [ADDRESS] * len(mailboxes),
        [ADDRESS] * len(translations),
    )

    @plgpu.inline_mgpu(arg_types=(SCALAR, *lists))
    def at(_, epoch, arrays, mailboxes, translations):
        i64 = ir.IntegerType.get_signless(64)
        tag = arith.extui(i64, epoch.registers.item())
        tag = arith.shli(tag, gpu.c(ADDRESS_BITS, i64))
        own = [arith.ori(llvm.ptrtoint(i64, utils.memref_ptr(array)), tag) for array in arrays]
        for_peers = own
        for words in translations:
            added = llvm.ptrtoint(i64, llvm_pointer(words))
            pointers = [llvm.ptrtoint(i64, utils.memref_ptr(array)) for array in arrays]
            for_peers = [arith.ori(arith.addi(pointer, added), tag) for pointer in pointers]
        with utils.single_thread(scope=scope):
            inline_ptx(None, [], "fence.acq_rel.sys;")
            for place, mailbox in enumerate(mailboxes):
                for number, word in enumerate(for_peers if place else own):
                    pointer = llvm_pointer(mailbox, gpu.c(number * POINTER_BYTES, i64))
                    inline_ptx(None, [pointer, word], "st.relaxed.sys.global.b64 [$0], $1;")

    at(epoch, list(arrays), [tuple(mailbox) for mailbox in mailboxes], translations)


def load_peer_pointer(mailbox: Address) -> Address:
    """Returns the pointer at an address in a mailbox, which this block has polled before."""

    @plgpu.inline_mgpu(arg_types=(ADDRESS,), return_type=(INT32, INT32))
    def at(_, mailbox):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        word = inline_ptx(i64, [llvm_pointer(mailbox)], "ld.global.b64 $0, [$1];")
        address = arith.andi(word, gpu.c((1 << ADDRESS_BITS) - 1, i64))
        high = arith.shrui(address, gpu.c(32, i64))
        return splat(arith.trunci(i32, address)), splat(arith.trunci(i32, high))

    low, high = at(tuple(mailbox))
    return Address(low, high, 0)
