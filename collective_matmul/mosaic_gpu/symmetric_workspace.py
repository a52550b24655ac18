"""Memory in which the devices of a mesh axis leave each other messages, at addresses that stay.

Every device of a mesh has one workspace for each axis along which it exchanges anything: along
another axis it has other peers, and how far these are must not be mistaken for how far those are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import device_constant

#: Of an exchange, at most so many blocks take part.
EXCHANGE_BLOCKS = 128
#: What a block of one device can leave at another in one exchange.
REGION_BYTES = 1 << 15
#: Of a meeting, at most so many: a Hopper GPU has no more multiprocessors.
RENDEZVOUS_BLOCKS = 144
# Words that different blocks count in lie so far apart: each in a cache line of its own.
_SIGNAL_STRIDE_BYTES = 128
# A device may be one exchange, or meeting, ahead of its peers, who still read what it left before.
SLOTS = 2


def epoch_offset(block: Any) -> Any:
    """Where, in bytes, the word lies that counts a block's own exchanges."""
    return block * _SIGNAL_STRIDE_BYTES


def signal_offset(source: int, block: Any) -> Any:
    """Where the word lies that counts what a source, from 1 on, has left for a block."""
    return (source * EXCHANGE_BLOCKS + block) * _SIGNAL_STRIDE_BYTES


def region_offset(devices: int, slot: Any, source: Any, block: Any) -> Any:
    """Where a source, from 0 for the device itself, leaves its message for a block."""
    words = devices * EXCHANGE_BLOCKS * _SIGNAL_STRIDE_BYTES
    return words + ((slot * devices + source) * EXCHANGE_BLOCKS + block) * REGION_BYTES


def mailbox_offset(devices: int, slot: Any, source: Any, block: Any) -> Any:
    """Where a source, from 0 for the device itself, leaves what its block says at a meeting."""
    before = region_offset(devices, SLOTS, 0, 0)
    return before + ((slot * devices + source) * RENDEZVOUS_BLOCKS + block) * _SIGNAL_STRIDE_BYTES


def workspace_bytes(devices: int) -> int:
    """Of each of so many devices along an axis."""
    return mailbox_offset(devices, SLOTS, 0, 0)


def workspace_pointers(axis_name: str) -> jax.Array:
    """Where the workspaces along a mesh axis lie. Called inside `jax.shard_map`.

    They are there as long as the process is.

    Returns:
      int32 [2 * D + 1]: both halves of the address of this device's own workspace, of the next
      device's along the axis, and so on; and last the index of this device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    table = device_constant(
        _PointerTable(mesh.axis_names.index(axis_name)), (*mesh.axis_sizes, devices, 2), np.int32
    )
    # Axes of size one may be automatic, and have no index then.
    place = (lax.axis_index(name) if size > 1 else 0 for name, size in mesh.shape.items())
    around = table[tuple(place)][(me + jnp.arange(devices)) % devices]
    return jnp.append(around.reshape(-1), me)


@dataclass(frozen=True)
class _PointerTable:
    """Makes the addresses of workspaces along an axis of a mesh from the mesh's devices."""

    axis: int

    def __call__(self, devices: np.ndarray) -> np.ndarray:
        """Int32 [*mesh, D, 2]: for each device those of all along the axis, in their order."""
        spaces = _allocate(tuple(devices.flat), devices.shape, self.axis)
        pointers = [spaces[device].unsafe_buffer_pointer() for device in devices.flat]
        words = np.array(pointers, np.uint64).view(np.int32).reshape(*devices.shape, 2)
        along = np.expand_dims(np.moveaxis(words, self.axis, -2), self.axis)
        return np.repeat(along, devices.shape[self.axis], self.axis)


# Programs may be lowered by several threads at once.
_allocation_lock = threading.Lock()
# Kept forever: compiled programs know where they lie.
_allocated: dict[Any, dict[Any, jax.Array]] = {}


def _allocate(devices: tuple[Any, ...], shape: tuple[int, ...], axis: int) -> dict[Any, jax.Array]:
    """The workspace of each device, for one axis of a mesh of this shape."""
    with _allocation_lock:
        if (devices, shape, axis) not in _allocated:
            count = workspace_bytes(shape[axis]) // 4
            spaces = [jax.device_put(np.zeros(count, np.int32), device) for device in devices]
            jax.block_until_ready(spaces)
            _allocated[devices, shape, axis] = dict(zip(devices, spaces, strict=True))
        return _allocated[devices, shape, axis]
