"""Symmetric workspaces: memory at fixed addresses through which kernels find their peers.

Every device has one workspace for each mesh axis along which it communicates. The layout is the
same on all devices, so the pointer to a peer's workspace and an offset address any field of it. For
an axis of D devices, a workspace holds:

    epochs       [EXCHANGE_BLOCKS]             int32, each in a cache line of its own
    regions      [PHASES, D, EXCHANGE_BLOCKS]  messages of one-shot exchanges, REGION_BYTES each
    mailboxes    [PHASES, D, RENDEZVOUS_BLOCKS]  pointers of a rendezvous, one cache line each
    report       whether a wait has taken too long, an int32, and the address of its record

The dimension D is the *source*, counted along the axis from the workspace's own device: source s in
the workspace of device d is device (d + s) % D. Epochs are those of the device's own blocks: how
many exchanges each has begun.

Workspaces are per axis because sources are: the second device along one axis is not the second
along another, and their messages must not be mixed up.

In one process they are arrays of JAX. Devices of several processes have memory that these share,
see `shared_memory`, which has another address in each process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import device_constant
from collective_matmul.mosaic_gpu.peers import shared_memory, timeout_reports
from collective_matmul.peer_access import peer_kernels_disallowed_reason

#: The largest number of blocks in an exchange.
EXCHANGE_BLOCKS = 128
#: The largest message of a block to one peer in one exchange, in bytes.
REGION_BYTES = 1 << 15
#: The largest number of blocks in a rendezvous. A Hopper GPU has no more multiprocessors.
RENDEZVOUS_BLOCKS = 144
# Blocks poll and count in cache lines of their own.
_STRIDE_BYTES = 128
#: Copies of regions and mailboxes, used in turn. A device may be one exchange, or one rendezvous,
#: ahead of a peer that still reads what the device stored for the one before.
PHASES = 2
#: Every word of a region that no message has reached: see `self_signalled`.
SENTINEL = -1
#: Size of a report, and where it has the address.
REPORT_BYTES, REPORT_POINTER_OFFSET = 16, 8


def epoch_offset(block: Any) -> Any:
    """Returns the byte offset of the counter of a block's own exchanges."""
    return block * _STRIDE_BYTES


def region_offset(devices: int, phase: Any, source: Any, block: Any) -> Any:
    """Returns the byte offset of the region that a source stores a block's message in."""
    first = EXCHANGE_BLOCKS * _STRIDE_BYTES
    return first + ((phase * devices + source) * EXCHANGE_BLOCKS + block) * REGION_BYTES


def mailbox_offset(devices: int, phase: Any, source: Any, block: Any) -> Any:
    """Returns the byte offset of the mailbox that a source publishes pointers to a block in."""
    start = region_offset(devices, PHASES, 0, 0)
    return start + ((phase * devices + source) * RENDEZVOUS_BLOCKS + block) * _STRIDE_BYTES


def report_offset(devices: int) -> int:
    """Returns the byte offset of the report."""
    return mailbox_offset(devices, PHASES, 0, 0)


def workspace_bytes(devices: int) -> int:
    """Returns the size of one workspace, for an axis of this many devices."""
    return report_offset(devices) + REPORT_BYTES


def workspace_pointers(axis_name: str, *, of_arrays: bool = False) -> jax.Array:
    """Returns the addresses of the workspaces along a mesh axis. Called inside `jax.shard_map`.

    Workspaces are allocated when the program is lowered, and never freed. Their addresses are
    compiled into the program as constants.

    Args:
      axis_name: a mesh axis of D devices.
      of_arrays: whether the kernel publishes addresses of arrays in a rendezvous.

    Returns:
      int32 [2 * D + 1]: the low and the high word of the address of this device's workspace, then
      of the next device's along the axis, and so on; and then the index of this device. With
      `of_arrays` in several processes, [2 * D + 3]: then also both words of what is added to an
      address of this device, for its peers.

    Raises:
      ValueError: if the program being traced is not compiled for kernels that address peers. All of
        them need these addresses, so no such program has one.
    """
    if reason := peer_kernels_disallowed_reason():
        raise ValueError(f"a kernel that addresses peers: {reason}")
    mesh = jax.sharding.get_abstract_mesh()
    devices, axis_index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    make = _PointerTable(mesh.axis_names.index(axis_name))
    table = device_constant(make, (*mesh.axis_sizes, devices, 2), np.int32)
    # Axes of size one may be automatic; those have no index.
    position = tuple(lax.axis_index(name) if size > 1 else 0 for name, size in mesh.shape.items())
    from_here_on = table[position][(axis_index + jnp.arange(devices)) % devices]
    pointers = jnp.append(from_here_on.reshape(-1), axis_index)
    if not of_arrays or jax.process_count() == 1:
        return pointers
    translations = device_constant(_translations, (*mesh.axis_sizes, 2), np.int32)
    return jnp.append(pointers, translations[position])


def _translations(devices: np.ndarray) -> np.ndarray:
    """Returns int32 [*mesh, 2]: what is added to addresses of each device, for its peers."""
    found = [shared_memory.pool_translation(device) for device in devices.flat]
    return np.array(found, np.uint64).view(np.int32).reshape(*devices.shape, 2)


@dataclass(frozen=True)
class _PointerTable:
    """Makes the table of workspace addresses along one axis of a mesh.

    Attributes:
      axis: which of the mesh's axes.
    """

    axis: int

    def __call__(self, devices: np.ndarray) -> np.ndarray:
        """Returns int32 [*mesh, D, 2]: for each device, the addresses of all along the axis."""
        workspaces = _allocate(tuple(devices.flat), devices.shape, self.axis)
        table = np.empty((*devices.shape, devices.shape[self.axis]), np.uint64)
        along_axis = np.moveaxis(devices, self.axis, -1)
        for place, device in np.ndenumerate(devices):
            others = along_axis[(*place[: self.axis], *place[self.axis + 1 :])]
            process = device.process_index
            table[place] = [workspaces.address(other, process) for other in others]
        return table[..., None].view(np.int32)


class Workspaces(Protocol):
    """The workspaces of the devices of a mesh, along one of its axes."""

    def address(self, device: Any, process: int) -> int:
        """Returns where the devices of a process find the workspace of a device."""
        ...


@dataclass(frozen=True)
class _OfOneProcess:
    """Workspaces of devices of one process: arrays, whose addresses all of them use.

    Attributes:
      arrays: the workspace of each device.
    """

    arrays: Mapping[Any, jax.Array]

    def address(self, device: Any, process: int) -> int:
        del process
        return self.arrays[device].unsafe_buffer_pointer()


# Several threads may lower programs at once.
_allocation_lock = threading.Lock()
# Never freed: compiled programs hold their addresses.
_allocated: dict[Any, Workspaces] = {}


def _allocate(devices: tuple[Any, ...], shape: tuple[int, ...], axis: int) -> Workspaces:
    """Returns the workspaces of the devices, for one axis of a mesh of this shape."""
    with _allocation_lock:
        if (devices, shape, axis) not in _allocated:
            size = workspace_bytes(shape[axis])
            if len({device.process_index for device in devices}) > 1:
                name = _shared_name(devices, shape, axis)
                made = shared_memory.share_on_nodes(
                    name,
                    devices,
                    size,
                    lambda device: _initial(size, shape[axis], device).tobytes(),
                )
            else:
                arrays = [
                    jax.device_put(_initial(size, shape[axis], device), device)
                    for device in devices
                ]
                jax.block_until_ready(arrays)
                made = _OfOneProcess(dict(zip(devices, arrays, strict=True)))
            _allocated[devices, shape, axis] = made
        return _allocated[devices, shape, axis]


def _shared_name(devices: tuple[Any, ...], shape: tuple[int, ...], axis: int) -> str:
    """Returns a name for the workspaces along an axis, which all processes give to them."""
    description = f"{[device.id for device in devices]} {shape} {axis}"
    return f"workspace/{hashlib.sha256(description.encode()).hexdigest()[:32]}"


def _initial(size: int, devices: int, device: Any) -> np.ndarray:
    """Returns a workspace of `size` bytes as int32, for an axis of `devices`.

    Regions are ready for messages, the report has its address, and all else is zero.
    """
    words = np.zeros(size // 4, np.int32)
    first, end = (region_offset(devices, phase, 0, 0) for phase in (0, PHASES))
    words[first // 4 : end // 4] = SENTINEL
    words[-2:] = np.array([timeout_reports.allocate(device)], np.uint64).view(np.int32)
    return words
