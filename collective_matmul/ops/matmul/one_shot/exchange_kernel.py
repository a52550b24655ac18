"""One-shot collectives for little data: every device stores what it has directly to its peers.

The algorithm, the same on all devices, and for every block on its own:

1. The block counts its epoch, which numbers its exchanges. Its parity selects one of two phases of
   the symmetric workspaces.
2. It stores its message to each peer in the peer's workspace, at an address that was compiled into
   the program. No signal follows: see `self_signalled`.
3. It takes the messages of all peers from its own workspace, each when it is there, and stores the
   result. Taking a message leaves the region ready for the next one.

Invariant: nobody waits before storing, since a region is stored to again only two exchanges later,
when its owner has taken what was in it. Proof: who begins exchange e + 2 has ended e + 1, in which
it took a message of every peer. A peer sends that in a launch after the one in which it has taken
all that e had left in the region.

All devices of an axis must execute their exchanges in the same order. Within one program they do.
Across programs that is up to whoever launches them: XLA does not know that the kernels communicate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul._compat import in_place_kernel, vary_over, varying_axes
from collective_matmul.mosaic_gpu import requirements
from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import (
    VECTOR_BYTES,
    WARPGROUP,
    WARPGROUP_LANES,
    Address,
    layout,
    load_int32,
    store_int32,
)
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited
from collective_matmul.mosaic_gpu.peers.self_signalled import store_message, take_message
from collective_matmul.mosaic_gpu.race_injection import delay_warpgroup, race_delay_steps
from collective_matmul.mosaic_gpu.requirements import Array

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

Kind = Literal["gather", "scatter", "reduce"]

# A box is what a block moves at once. The smallest has one vector for each lane; the largest is
# what the registers hold. In bytes.
_SMALLEST_BOX, _LARGEST_BOX = WARPGROUP_LANES * VECTOR_BYTES, 8 * WARPGROUP_LANES * VECTOR_BYTES
#: The largest message of a device to each of its peers, in bytes.
MOST_BYTES = symmetric_workspace.EXCHANGE_BLOCKS * symmetric_workspace.REGION_BYTES


def all_gather(
    x: jax.Array,
    axis_name: str,
    *,
    replicated: bool = False,
    race_delays: bool = False,
) -> jax.Array:
    """Computes ``lax.all_gather(x, axis_name)``. Called inside `jax.shard_map`.

    Args:
      x: this device's shard, [...], bfloat16 or float16, of at most `MOST_BYTES`.
      axis_name: a mesh axis of D devices of one node.
      replicated: whether the result is typed as replicated over the axis.
      race_delays: whether blocks wait for random times before they send and before they receive, so
        that races show. For tests.

    Returns:
      [D, ...].

    Raises:
      ValueError: if x is larger than `MOST_BYTES`.
    """
    y = _shared_launch("gather", axis_name, race_delays, replicated)(_boxes(x))
    return y.reshape(y.shape[0], -1)[:, : x.size].reshape(-1, *x.shape)


def reduce_scatter(x: jax.Array, axis_name: str, *, race_delays: bool = False) -> jax.Array:
    """Computes ``lax.psum_scatter(x, axis_name)``. Called inside `jax.shard_map`.

    Terms are added in float32, in the order of the devices from this one on, and rounded once. So
    the result has the same bits in every run.

    Args:
      x: this device's terms, [D, ...], bfloat16 or float16; x[0] is of at most `MOST_BYTES`.
      axis_name: a mesh axis of D devices of one node.
      race_delays: as for `all_gather`.

    Returns:
      [...].

    Raises:
      ValueError: if x[0] is larger than `MOST_BYTES`.
    """
    boxes = jax.vmap(_boxes)(x)
    y = _shared_launch("scatter", axis_name, race_delays, False)(boxes)
    return y.reshape(-1)[: math.prod(x.shape[1:])].reshape(x.shape[1:])


def all_reduce(x: jax.Array, axis_name: str, *, race_delays: bool = False) -> jax.Array:
    """Computes ``lax.psum(x, axis_name)``. Called inside `jax.shard_map`.

    Terms are added in float32, in the order of device indices, and rounded once. So the result has
    the same bits on all devices and in every run.

    Args:
      x: this device's term, [...], bfloat16 or float16, of at most `MOST_BYTES`.
      axis_name: a mesh axis of D devices of one node.
      race_delays: as for `all_gather`.

    Returns:
      [...], typed as replicated over the axis.

    Raises:
      ValueError: if x is larger than `MOST_BYTES`.
    """
    y = _shared_launch("reduce", axis_name, race_delays, True)(_boxes(x))
    # Else XLA computes what follows, such as a norm, in the shape of boxes, by more kernels.
    return lax.optimization_barrier(y.reshape(-1)[: x.size].reshape(x.shape))


def unsupported_reason(message: Array, devices: int) -> str | None:
    """Returns why devices cannot send such an array to each of their peers; None if they can."""
    return requirements.unsupported_reason(devices, message) or _too_large_reason(message)


def _too_large_reason(message: Array) -> str | None:
    """Returns that the blocks' parts of a message do not fit in regions; None if they do."""
    size = math.prod(message.shape) * message.dtype.itemsize
    if size > MOST_BYTES:
        return f"{message.shape} are {size} bytes for each peer, and one shot takes {MOST_BYTES}"
    return None


def _boxes(x: jax.Array) -> jax.Array:
    """Returns x padded and reshaped, [...] -> [boxes, elements of a box].

    There are as many boxes as blocks if x is large enough.

    Raises:
      ValueError: if x is too large: boxes would be stored in the regions of others.
    """
    if reason := _too_large_reason(x):
        raise ValueError(f"{reason}; send it in parts, or by XLA's collective")
    itemsize = x.dtype.itemsize
    box = _SMALLEST_BOX
    while box < _LARGEST_BOX and x.size * itemsize > box * symmetric_workspace.EXCHANGE_BLOCKS:
        box *= 2
    elements = box // itemsize
    return jnp.pad(x.reshape(-1), (0, -x.size % elements)).reshape(-1, elements)


@functools.cache
def _shared_launch(kind: Kind, axis_name: str, race_delays: bool, replicated: bool) -> Any:
    """Returns one function for all equal launches: they are traced, lowered and compiled once.

    Returns:
      ``launch(x) -> y``, both [boxes, elements]. The operand of "scatter" and the result of
      "gather" are [D, boxes, elements].
    """

    @sequential_vmap
    def launch(x: jax.Array) -> jax.Array:
        devices, axes = lax.axis_size(axis_name), varying_axes(x)
        if replicated:
            axes -= {axis_name}
        shape = (devices, *x.shape) if kind == "gather" else x.shape[-2:]
        y = vary_over(lax.empty(shape, x.dtype), axes)
        boxes = x.shape[-2]
        mesh = plgpu.Mesh(
            grid=(min(boxes, symmetric_workspace.EXCHANGE_BLOCKS),),
            grid_names=("block",),
            num_threads=1,
            thread_name="warpgroup",
            kernel_name=f"one_shot_{kind}",
        )
        exchange = Exchange(kind, devices, boxes, race_delays)
        kernel = in_place_kernel(exchange.run, mesh, [y], name=f"one_shot_{kind}")
        return kernel(symmetric_workspace.workspace_pointers(axis_name), x)[0]

    return jax.jit(launch)


class Exchange:
    """The body of the kernel."""

    def __init__(self, kind: Kind, devices: int, boxes: int, race_delays: bool):
        self.kind: Kind = kind
        self.devices = devices
        self.boxes = boxes
        self.race_delays = race_delays

    def run(self, workspace_pointers: Any, x: Any, y: Any) -> None:
        """Executes one block.

        Args:
          workspace_pointers: a reference, see `symmetric_workspace.workspace_pointers`.
          x: a reference to the operand, [boxes, elements]; [D, boxes, elements] to scatter.
          y: a reference to the result, [boxes, elements]; [D, boxes, elements] when gathering.
        """
        devices, block = self.devices, lax.axis_index("block")
        workspaces = [
            Address(workspace_pointers[2 * offset], workspace_pointers[2 * offset + 1], 0)
            for offset in range(devices)
        ]
        axis_index, own_workspace = workspace_pointers[2 * devices], workspaces[0]
        epoch_counter = own_workspace.plus(symmetric_workspace.epoch_offset(block))
        epoch = load_int32(epoch_counter) + 1

        def region(workspace: Address, source: Any) -> Address:
            phase = epoch & (symmetric_workspace.PHASES - 1)
            return workspace.plus(symmetric_workspace.region_offset(devices, phase, source, block))

        # For the device at an offset, this device is the source at minus that offset.
        sources = [-offset % devices for offset in range(devices)]
        regions = list(map(region, workspaces, sources))
        self.delay(axis_index, epoch, block)
        # No wait before these stores: see the invariant at the top of this file.
        self.for_boxes(functools.partial(self.send, x, y, axis_index, regions))
        store_int32(epoch_counter, epoch, WARPGROUP)
        self.delay(axis_index, epoch + 1, block)
        report = own_workspace.plus(symmetric_workspace.report_offset(devices))
        awaited = Awaited(f"one_shot_{self.kind}", "messages of peers", report)

        def take(source: Any, box_offset: int) -> jax.Array:
            address = region(own_workspace, source).plus(box_offset)
            return take_message(epoch, address, x.shape[-1:], x.dtype, awaited)

        self.for_boxes(functools.partial(self.receive, x, y, axis_index, take))

    def delay(self, axis_index: Any, number: Any, block: Any) -> None:
        """Waits for a random time if tests ask for that."""
        if self.race_delays:
            delay_warpgroup(race_delay_steps(axis_index, number, block))

    def for_boxes(self, act: Callable[[Any, int], None]) -> None:
        """Calls ``act(box, offset)`` for each box of this block.

        `box` is its index, and `offset` the byte offset of the box in a region: a block's boxes are
        stored in its regions one after the other.
        """
        blocks = lax.axis_size("block")
        for number in range(pl.cdiv(self.boxes, blocks)):
            box = lax.axis_index("block") + number * blocks
            pl.when(box < self.boxes)(functools.partial(act, box, number * _LARGEST_BOX))

    def send(self, x, y, axis_index, regions: list[Address], box, box_offset: int) -> None:
        """Stores a box in the regions of all devices that receive it.

        Args:
          x: see `run`.
          y: see `run`.
          axis_index: the index of this device.
          regions: this block's region in the workspace of each device, from this device on.
          box: the index of the box.
          box_offset: the byte offset of the box in each region.
        """
        peers = list(enumerate(regions))[1:]
        if self.kind == "scatter":
            for offset, peer_region in peers:
                value = self.load(x.at[self.device_at(axis_index, offset), box])
                store_message(peer_region.plus(box_offset), value)
            return
        value = self.load(x.at[box])
        for _, peer_region in peers:
            store_message(peer_region.plus(box_offset), value)
        if self.kind == "gather":
            y[axis_index, box] = value
        else:
            store_message(regions[0].plus(box_offset), value)

    def receive(self, x, y, axis_index, take: Callable, box, box_offset: int) -> None:
        """Takes a box of all sources and stores the result.

        Args:
          x: see `run`.
          y: see `run`.
          axis_index: the index of this device.
          take: returns what this block has received from a source at a byte offset.
          box: the index of the box.
          box_offset: the byte offset of the box in each region.
        """

        def load_from(source: Any) -> jax.Array:
            return take(source, box_offset)

        if self.kind == "gather":
            for source in range(1, self.devices):
                y[self.device_at(axis_index, source), box] = load_from(source)
            return
        if self.kind == "scatter":
            first = self.load(x.at[axis_index, box])
            rest = map(load_from, range(1, self.devices))
        else:
            # Sources in the order of device indices: all devices add in the same order, so all get
            # the same bits.
            sources = [
                lax.rem(device - axis_index + self.devices, self.devices)
                for device in range(self.devices)
            ]
            first, *rest = map(load_from, sources)
        total = first.astype(jnp.float32)
        for term in rest:
            total += term.astype(jnp.float32)
        y[box] = total.astype(x.dtype)

    def device_at(self, axis_index: Any, offset: int) -> Any:
        """Returns the index of the device `offset` places after this one along the axis."""
        return lax.rem(axis_index + offset, self.devices)

    def load(self, box_ref: Any) -> jax.Array:
        """Returns a box of an array of this device, in the layout that `store_message` takes."""
        return plgpu.load(box_ref, layout=layout(box_ref.shape, box_ref.dtype), optimized=False)
