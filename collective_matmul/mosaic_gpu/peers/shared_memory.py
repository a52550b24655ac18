"""Memory of GPUs that the processes of a node share, each with GPUs of its own.

In a program of several nodes, each node shares by itself. All processes know all addresses.

There are two kinds:

- *Shared memory* is allocated for the purpose (`share`). Every process maps it at addresses of its
  own. All know the addresses of all, so that the table of addresses which is compiled into a
  program is the same in each of them.
- *Pools* are the memory that XLA allocates arrays from (`pools`). Each process maps the pools of
  all devices at addresses that are the same everywhere. So a device publishes one address of an
  array, that of its own plus a constant, and all peers find the array there. XLA has one pool for
  each device that never grows, unless it is told not to preallocate it.

An array that is not in the pool would be published at an address where nothing is mapped: the pools
are far apart.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from collective_matmul.mosaic_gpu.peers import virtual_memory
from collective_matmul.mosaic_gpu.peers.process_group import (
    ProcessGroup,
    SharingError,
    agreed,
    on_all_nodes,
)

# Where the pools of a node are mapped. Linux and the driver put nothing there by themselves.
# Addresses have 47 bits: there is room for 64 pools.
_FIRST_POOL, _BETWEEN_POOLS = 0x2000_0000_0000, 1 << 40


@dataclass(frozen=True)
class SharedMemory:
    """Memory on some devices that all of their processes have mapped.

    Attributes:
      devices: the devices, in the order of their allocations.
      bases: by process, the address at which it has mapped the first allocation.
      mapped: the range of this process.
    """

    devices: tuple[Any, ...]
    bases: Mapping[int, int]
    mapped: virtual_memory.MappedRange

    def address(self, device: Any, process: int) -> int:
        """Returns the address of a device's memory for the devices of a process."""
        return self.bases[process] + self.devices.index(device) * self.mapped.size


@dataclass(frozen=True)
class SharedOnNodes:
    """Memory on devices of several nodes, of which the processes of each node have mapped theirs.

    Attributes:
      addresses: see `address`, by "process/device".
      mapped: what is mapped here is kept with it.
    """

    addresses: Mapping[str, int]
    mapped: Sequence[SharedMemory]

    def address(self, device: Any, process: int) -> int:
        """Returns the address of a device's memory for the devices of a process of its node.

        Raises:
          SharingError: if they are on different nodes.
        """
        key = f"{process}/{device.id}"
        if key not in self.addresses:
            raise SharingError(
                f"{device} is on another node than process {process}, and kernels that address"
                " peers' memory need all devices along a mesh axis on one node: order the mesh's"
                " devices so, or compile with peer_kernels=False"
            )
        return self.addresses[key]


def share_on_nodes(
    name: str, devices: Sequence[Any], size: int, content: Callable[[Any], bytes]
) -> SharedOnNodes:
    """Allocates memory on each device, which the devices of its node may access: see `share`."""
    here: list[SharedMemory] = []

    def act(name: str, devices: Sequence[Any]) -> dict[str, int]:
        here.append(shared := share(name, devices, size, content))
        return {
            f"{process}/{device.id}": shared.address(device, process)
            for process in shared.bases
            for device in shared.devices
        }

    return SharedOnNodes(on_all_nodes(name, devices, act), here)


def share(
    name: str, devices: Sequence[Any], size: int, content: Callable[[Any], bytes]
) -> SharedMemory:
    """Allocates memory on each device, which the devices of all their processes may access.

    Every process of the devices calls this, with the same arguments and in the same order. It
    returns in none of them before the memory of all devices is filled and mapped. The memory is
    kept until the process ends, or has unmapped it: `SharedMemory.mapped`.

    Args:
      name: names this memory in the key-value store; can be used once.
      devices: the devices, of several processes.
      size: bytes on each device.
      content: returns what the memory of one of this process's devices is filled with.

    Raises:
      SharingError: in all processes, if one of them fails or does not call this in time.
    """
    with ProcessGroup(name, devices) as group, contextlib.ExitStack() as undo:
        ranges: list[virtual_memory.MappedRange] = []

        def make_handles() -> tuple[list[int], int]:
            rounded = max(virtual_memory.rounded_size(size, each) for each in group.ordinals)
            handles = []
            for device, ordinal in zip(group.own, group.ordinals, strict=True):
                handles.append(group.released(virtual_memory.allocate(rounded, ordinal)))
                mapped = virtual_memory.MappedRange(handles[-1:], rounded, [ordinal])
                try:
                    virtual_memory.write(mapped.base, content(device), ordinal)
                finally:
                    mapped.unmap()
            return handles, rounded

        def map_all(handles: Sequence[int], told: Mapping[int, int]) -> int:
            if len(sizes := {*told.values()}) > 1:
                raise SharingError(f"processes allocate in different units: {sorted(sizes)} bytes")
            mapped = virtual_memory.MappedRange(handles, sizes.pop(), group.ordinals)
            undo.callback(mapped.unmap)
            ranges.append(mapped)
            return mapped.base

        bases = group.meet(make_handles, map_all)
        undo.pop_all()
    return SharedMemory(group.devices, bases, ranges[0])


@dataclass(frozen=True)
class Pools:
    """The pools of all devices, mapped by each process at the same addresses.

    Attributes:
      translations: by the id of a device, what to add to the address of an array of its own so that
        its peers find the array. Modulo 2**64.
      mapped: the ranges of this process.
    """

    translations: Mapping[int, int]
    mapped: Sequence[virtual_memory.MappedRange]

    def unmap(self) -> None:
        """Unmaps all; the pools are still their owners'."""
        for each in self.mapped:
            each.unmap()


def share_pools(name: str, devices: Sequence[Any]) -> Pools:
    """Maps XLA's memory on all devices. Every process of the devices calls this.

    Args:
      name: as for `share`.
      devices: the devices, of several processes.

    Raises:
      SharingError: in all processes, if one of them fails or does not call this in time.
    """
    with ProcessGroup(name, devices) as group, contextlib.ExitStack() as undo:
        ranges: list[virtual_memory.MappedRange] = []

        def make_handles() -> tuple[list[int], list[tuple[int, int]]]:
            handles, told = [], []
            for device, ordinal in zip(group.own, group.ordinals, strict=True):
                base, size, handle = virtual_memory.allocation_of(_any_address(device), ordinal)
                handles.append(group.released(handle))
                told.append((base, size))
                if size < _pool_bytes(device):
                    raise SharingError(
                        f"XLA allocates memory on {device} as it needs it; let it preallocate, as"
                        " it does unless XLA_PYTHON_CLIENT_PREALLOCATE or"
                        " XLA_PYTHON_CLIENT_ALLOCATOR says otherwise"
                    )
            return handles, told

        def map_all(handles: Sequence[int], told: Mapping[int, list]) -> list[int]:
            for place, (handle, (_, size)) in enumerate(zip(handles, in_order(told), strict=True)):
                base = _pool_base(place)
                mapped = virtual_memory.MappedRange([handle], size, group.ordinals, base)
                undo.callback(mapped.unmap)
                ranges.append(mapped)
            return told[group.process]

        def in_order(told: Mapping[int, list]) -> list[tuple[int, int]]:
            in_turn = {number: iter(each) for number, each in told.items()}
            return [next(in_turn[device.process_index]) for device in group.devices]

        found = in_order(group.meet(make_handles, map_all))
        undo.pop_all()
    translations = {
        device.id: (_pool_base(place) - base) % (1 << 64)
        for place, (device, (base, _)) in enumerate(zip(group.devices, found, strict=True))
    }
    return Pools(translations, ranges)


def _pool_base(place: int) -> int:
    """Returns where all processes map the pool of a device."""
    return _FIRST_POOL + place * _BETWEEN_POOLS


def _any_address(device: Any) -> int:
    """Returns the address of an array on a device."""

    def address() -> int:
        array = jax.device_put(np.zeros(1, np.int32), device)
        return array.block_until_ready().unsafe_buffer_pointer()

    # In this thread JAX may be tracing a function, and would trace this too.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(address).result()


def _pool_bytes(device: Any) -> int:
    """Returns the most that XLA allocates on a device."""
    return device.memory_stats()["bytes_limit"]


_lock = threading.Lock()
# The answers of `unshared_reason` and `unshared_pools_reason`, once they are known; the pools of
# this node; and what is added to addresses in those of all nodes, by the id of the device.
_unshared: dict[str, str | None] = {}
_pools: list[Pools] = []
_translations: dict[str, int] = {}


def unshared_reason() -> str | None:
    """Returns why the processes of a node cannot share memory; None if those of all nodes can.

    The first call shares a little memory to find out. It waits until every process has called it.
    All of them return the same, also if one of them was late: the first to know decides.
    """

    def trial(name: str, devices: Sequence[Any]) -> dict[str, int]:
        share(name, devices, 1, lambda device: b"\0").mapped.unmap()
        return {}

    return _found_once("memory", lambda: on_all_nodes("memory/trial", jax.devices(), trial))


def unshared_pools_reason() -> str | None:
    """Returns why they cannot map each other's pools; None if they have mapped them. Likewise."""

    def map_pools(name: str, devices: Sequence[Any]) -> dict[str, int]:
        _pools.append(share_pools(name, devices))
        return {str(device): added for device, added in _pools[-1].translations.items()}

    def attempt() -> None:
        _translations.update(on_all_nodes("pools", jax.devices(), map_pools))

    return _found_once("pools", attempt)


def pool_translation(device: Any) -> int:
    """Returns what to add to an address on a device for its peers: see `Pools`.

    Raises:
      SharingError: if the pools are not mapped, see `unshared_pools_reason`.
    """
    if reason := unshared_pools_reason():
        raise SharingError(reason)
    if not _translations:
        raise SharingError("this process was too late to map the memory of the others")
    return _translations[str(device.id)]


def _found_once(what: str, attempt: Callable[[], Any]) -> str | None:
    """Returns why an attempt fails, in any process; None if it succeeds."""
    with _lock:
        if what not in _unshared:
            try:
                attempt()
                reason = ""
            except SharingError as error:
                reason = str(error)
            _unshared[what] = agreed(f"{what}/decision", reason) or None
        return _unshared[what]
