"""Collectives of little data: every device stores what it has straight in its peers' memory.

The algorithm, the same on all devices and for every block by itself:

1. Count the exchange: the block's epoch. It alternates between two slots of the workspaces.
2. Store what each peer is to get in its workspace, at addresses that were known when the program
   was compiled; then announce the epoch there.
3. Wait until all peers have announced it here, and load what they left.

No device waits before it stores: a slot is stored to again two exchanges later. Whoever begins that
one has ended the one between, for which every peer has announced its epoch, after it had ended the
first and loaded all that lay in the slot.

All devices of an axis must run their exchanges in the same order. Within a program they do; of
programs it is up to who launches them, since XLA does not know that they meet.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul._compat import in_place_kernel, vary_over, varying_axes
from collective_matmul.mosaic_gpu import requirements, symmetric_workspace
from collective_matmul.mosaic_gpu.peer_memory import (
    VECTOR_BYTES,
    WARPGROUP_LANES,
    Address,
    layout,
    load,
    load_int32,
    set_signals,
    store,
    wait_for_signals,
)
from collective_matmul.mosaic_gpu.requirements import Array, delay, delays_of

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu

Kind = Literal["gather", "scatter", "reduce"]

#: Bytes of the smallest box, a vector for each lane, and of the largest, which registers hold.
_SMALLEST_BOX, _LARGEST_BOX = WARPGROUP_LANES * VECTOR_BYTES, 8 * WARPGROUP_LANES * VECTOR_BYTES
#: What a device can send to each of its peers at once.
MOST_BYTES = symmetric_workspace.EXCHANGE_BLOCKS * symmetric_workspace.REGION_BYTES

#: Of an exchange inside a program on H200 GPUs: its launch and the announcements, and what a device
#: sends to all of its peers together.
_SECONDS = 7e-6
_BYTES_PER_SECOND = 2.4e11


def all_gather(
    x: jax.Array, axis_name: str, *, replicated: bool = False, delays: bool = False
) -> jax.Array:
    """``lax.all_gather(x, axis_name)``: [...] -> [D, ...]. Called inside `jax.shard_map`.

    Args:
      x: bfloat16 or float16, of at most `MOST_BYTES`.
      axis_name: a mesh axis of D devices, all driven by this process.
      replicated: whether the result is typed so over the axis.
      delays: has blocks wait for random times before each message, so that races show. For tests.

    Raises:
      ValueError: if x is larger.
    """
    y = _shared_launch("gather", axis_name, delays, replicated)(_boxes(x))
    return y.reshape(y.shape[0], -1)[:, : x.size].reshape(-1, *x.shape)


def reduce_scatter(x: jax.Array, axis_name: str, *, delays: bool = False) -> jax.Array:
    """``lax.psum_scatter(x, axis_name)``: [D, ...] -> [...]. Called inside `jax.shard_map`.

    Summed in float32, in the order of the devices behind the one that keeps the sum, and rounded
    once: the same bits every time. All else is as for `all_gather`; it is x[0] that is limited.
    """
    boxes = jax.vmap(_boxes)(x)
    y = _shared_launch("scatter", axis_name, delays, False)(boxes)
    return y.reshape(-1)[: math.prod(x.shape[1:])].reshape(x.shape[1:])


def all_reduce(x: jax.Array, axis_name: str, *, delays: bool = False) -> jax.Array:
    """``lax.psum(x, axis_name)``, the same bits on all devices. Called inside `jax.shard_map`.

    Summed in float32, in the order of the devices, and rounded once. All else is as for
    `all_gather`.

    Returns:
      [...], typed as replicated over the axis.
    """
    y = _shared_launch("reduce", axis_name, delays, True)(_boxes(x))
    return y.reshape(-1)[: x.size].reshape(x.shape)


def unsupported_reason(sent: Array, devices: int) -> str | None:
    """Why no device can send such an array to each of its peers, in words; None if all can."""
    return requirements.unsupported_reason(devices, sent) or _too_much(sent)


def predicted_seconds(size: int, devices: int) -> float:
    """What it should take for each of so many devices to send so many bytes to each other one."""
    return _SECONDS + (devices - 1) * size / _BYTES_PER_SECOND


def is_two_shot(size: int, devices: int) -> bool:
    """Whether it is faster to reduce and scatter so many bytes, and then to gather the sums."""
    two = 2 * predicted_seconds(-(-size // devices), devices)
    return size > MOST_BYTES or two < predicted_seconds(size, devices)


def _too_much(sent: Array) -> str | None:
    """That no region of a workspace holds a block's part of it, in words; None if they do."""
    size = math.prod(sent.shape) * sent.dtype.itemsize
    if size > MOST_BYTES:
        return f"{sent.shape} are {size} bytes for each peer, and one shot takes {MOST_BYTES}"
    return None


def _boxes(x: jax.Array) -> jax.Array:
    """[...] -> [boxes, elements of a box], with as many boxes as blocks if there is enough.

    Raises:
      ValueError: if they would not fit into the regions that they are for, but reach into others.
    """
    if reason := _too_much(x):
        raise ValueError(f"{reason}; send it in parts, or by XLA's collective")
    itemsize = x.dtype.itemsize
    box = _SMALLEST_BOX
    while box < _LARGEST_BOX and x.size * itemsize > box * symmetric_workspace.EXCHANGE_BLOCKS:
        box *= 2
    elements = box // itemsize
    return jnp.pad(x.reshape(-1), (0, -x.size % elements)).reshape(-1, elements)


@functools.cache
def _shared_launch(kind: Kind, axis_name: str, delays: bool, replicated: bool) -> Any:
    """One function for all launches alike, so that they are traced, lowered and compiled once.

    Returns:
      ``launch(x) -> y``, both [boxes, elements], but x to be scattered, and y that was gathered,
      [D, boxes, elements].
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
        work = Exchange(kind, devices, boxes, delays)
        kernel = in_place_kernel(work.run, mesh, [y], name=f"one_shot_{kind}")
        return kernel(symmetric_workspace.workspace_pointers(axis_name), x)[0]

    return jax.jit(launch)


class Exchange:
    """The kernel's body."""

    def __init__(self, kind: Kind, devices: int, boxes: int, delays: bool):
        self.kind: Kind = kind
        self.devices = devices
        self.boxes = boxes
        self.delays = delays

    def run(self, words, x, y) -> None:
        """What every block runs; words as of `symmetric_workspace.workspace_pointers`, x and y as of the launch."""
        devices, block = self.devices, lax.axis_index("block")
        spaces = [Address(words[2 * n], words[2 * n + 1], 0) for n in range(devices)]
        me, own = words[2 * devices], spaces[0]
        counter = own.plus(symmetric_workspace.epoch_offset(block))
        epoch = load_int32(counter) + 1

        def region(space: Address, source: Any) -> Address:
            slot = epoch & (symmetric_workspace.SLOTS - 1)
            return space.plus(symmetric_workspace.region_offset(devices, slot, source, block))

        def flag(space: Address, source: int) -> Address:
            return space.plus(symmetric_workspace.signal_offset(source, block))

        # As another device counts, from itself on, this one is so far away.
        sources = [-n % devices for n in range(devices)]
        self.for_boxes(functools.partial(self.send, x, y, me, list(map(region, spaces, sources))))
        if self.delays:
            delay(delays_of(me, block, epoch))
        set_signals(epoch, [counter, *map(flag, spaces[1:], sources[1:])])
        wait_for_signals(epoch, [flag(own, source) for source in range(1, devices)])
        self.for_boxes(functools.partial(self.receive, x, y, me, functools.partial(region, own)))

    def for_boxes(self, act: Any) -> None:
        """Calls ``act(box, offset)`` for this block's boxes, which lie so far behind a region."""
        blocks = lax.axis_size("block")
        for turn in range(pl.cdiv(self.boxes, blocks)):
            box = lax.axis_index("block") + turn * blocks
            pl.when(box < self.boxes)(functools.partial(act, box, turn * _LARGEST_BOX))

    def send(self, x, y, me, regions: list[Address], box, offset: int) -> None:
        """Stores a box in the regions of all devices that get it; of these, this one's is first."""
        for number, place in enumerate(regions):
            if self.kind == "scatter":
                if number == 0:
                    continue
                value = self.load(x.at[self.device(me, number), box])
            elif number == 0:
                value = self.load(x.at[box])
            if self.kind == "gather" and number == 0:
                y[me, box] = value
            else:
                store(place.plus(offset), value)

    def receive(self, x, y, me, region, box, offset: int) -> None:
        """Loads what the others left, and stores it or what it comes to."""

        def load_from(source: Any) -> jax.Array:
            return load(region(source).plus(offset), x.shape[-1:], x.dtype)

        if self.kind == "gather":
            for source in range(1, self.devices):
                y[self.device(me, source), box] = load_from(source)
            return
        if self.kind == "scatter":
            first = self.load(x.at[me, box])
            rest = map(load_from, range(1, self.devices))
        else:
            # In the order of the devices, and so from here on the sum is the same everywhere.
            places = [lax.rem(n - me + self.devices, self.devices) for n in range(self.devices)]
            first, *rest = map(load_from, places)
        total = first.astype(jnp.float32)
        for term in rest:
            total += term.astype(jnp.float32)
        y[box] = total.astype(x.dtype)

    def device(self, me, number: int) -> Any:
        """The index of the device so far behind this one."""
        return lax.rem(me + number, self.devices)

    def load(self, ref) -> jax.Array:
        """A box, in vectors."""
        return plgpu.load(ref, layout=layout(ref.shape, ref.dtype), optimized=False)
