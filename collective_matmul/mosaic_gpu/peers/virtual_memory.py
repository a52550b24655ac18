"""Memory of GPUs that several processes map, by CUDA's virtual memory management.

A process allocates memory on its GPU and exports it as a file descriptor. Another process of the
node imports what it has received, and maps it: then its GPUs address that memory by NVLink. The
memory exists until every process that has mapped it has unmapped it or ended. So a process that
ends takes nothing from the others.

Nothing here is a multicast object: every store goes to the memory of one GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from collective_matmul import peer_access

# Constants of cuda.h.
_ALLOCATION_PINNED = 1
_HANDLE_POSIX_FILE_DESCRIPTOR = 1
_LOCATION_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_RECOMMENDED = 1
_ATTRIBUTES = {102: "virtual memory", 103: "memory that is exported as a file descriptor"}


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("options", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("access", ctypes.c_int)]


class DriverError(RuntimeError):
    """A call of NVIDIA's driver that failed: its function, and the name of the error."""


def unsupported_reason(device: int) -> str | None:
    """Returns what this machine lacks to share the memory of a GPU; None if it lacks nothing.

    Args:
      device: the ordinal of one of the GPUs that this process sees.
    """
    if peer_access.cuda_driver() is None:
        return "NVIDIA's driver, libcuda.so.1, is not there"
    for number, name in _ATTRIBUTES.items():
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), number, _ordinal(device))
        if not value.value:
            return f"GPU {device} has no {name}"
    return None


def rounded_size(size: int, device: int) -> int:
    """Returns the smallest size of an allocation of at least `size` bytes."""
    granularity = ctypes.c_size_t()
    _call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(granularity),
        ctypes.byref(_properties(device)),
        _GRANULARITY_RECOMMENDED,
    )
    return -(-size // granularity.value) * granularity.value


def allocate(size: int, device: int) -> int:
    """Returns the handle of new memory, for `release`.

    Args:
      size: bytes, see `rounded_size`.
      device: the ordinal of the GPU.
    """
    handle = ctypes.c_uint64()
    properties = ctypes.byref(_properties(device))
    _call(
        "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0)
    )
    return handle.value


def export(handle: int) -> int:
    """Returns a file descriptor of allocated memory, which the caller closes."""
    descriptor = ctypes.c_int()
    _call(
        "cuMemExportToShareableHandle",
        ctypes.byref(descriptor),
        ctypes.c_uint64(handle),
        _HANDLE_POSIX_FILE_DESCRIPTOR,
        ctypes.c_uint64(0),
    )
    return descriptor.value


def import_descriptor(descriptor: int) -> int:
    """Returns the handle of memory that another process has exported, for `release`."""
    handle = ctypes.c_uint64()
    _call(
        "cuMemImportFromShareableHandle",
        ctypes.byref(handle),
        ctypes.c_void_p(descriptor),
        _HANDLE_POSIX_FILE_DESCRIPTOR,
    )
    return handle.value


def release(handle: int) -> None:
    """Gives up a handle. The memory exists as long as it is mapped anywhere."""
    _call("cuMemRelease", ctypes.c_uint64(handle))


class MappedRange:
    """Allocations of one size at consecutive addresses, which GPUs of this process may access.

    Attributes:
      base: the address of the first.
      size: the bytes of each.
      count: how many they are.
    """

    def __init__(self, handles: Sequence[int], size: int, devices: Sequence[int], base: int = 0):
        """Maps the allocations of these handles.

        Args:
          handles: handles of allocations, own or imported.
          size: bytes of each.
          devices: the ordinals of the GPUs that load from them and store to them.
          base: the address of the first; 0 for one that the driver chooses.

        Raises:
          DriverError: among other reasons, if a GPU cannot address the memory of another, or if the
            addresses from `base` on are not free.
        """
        self.size, self.count = size, len(handles)
        self._mapped = 0
        pointer = ctypes.c_uint64()
        wanted, no_flag = ctypes.c_uint64(base), ctypes.c_uint64(0)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(pointer),
            self._bytes(self.count),
            ctypes.c_size_t(0),
            wanted,
            no_flag,
        )
        self.base = pointer.value
        with contextlib.ExitStack() as undo:
            undo.callback(self.unmap)
            if base not in (0, self.base):
                raise DriverError(f"cuMemAddressReserve: address {base:#x} is in use")
            for handle in handles:
                self._map_next(handle)
            access = (_Access * len(devices))()
            for each, device in zip(access, devices, strict=True):
                each.location = _Location(_LOCATION_DEVICE, _ordinal(device).value)
                each.access = _ACCESS_READ_WRITE
            count = ctypes.c_size_t(len(devices))
            _call("cuMemSetAccess", pointer, self._bytes(self.count), access, count)
            undo.pop_all()

    def address(self, place: int) -> int:
        """Returns the address of an allocation, by its place in the range."""
        return self.base + place * self.size

    def unmap(self) -> None:
        """Unmaps all and gives up the addresses. Nothing may use them any more."""
        for place in range(self._mapped):
            _call("cuMemUnmap", ctypes.c_uint64(self.address(place)), self._bytes(1))
        self._mapped = 0
        _call("cuMemAddressFree", ctypes.c_uint64(self.base), self._bytes(self.count))

    def _map_next(self, handle: int) -> None:
        address, start = ctypes.c_uint64(self.address(self._mapped)), ctypes.c_size_t(0)
        no_flag = ctypes.c_uint64(0)
        _call("cuMemMap", address, self._bytes(1), start, ctypes.c_uint64(handle), no_flag)
        self._mapped += 1

    def _bytes(self, allocations: int) -> ctypes.c_size_t:
        return ctypes.c_size_t(allocations * self.size)


def allocation_of(address: int, device: int) -> tuple[int, int, int]:
    """Returns the allocation that an address belongs to: its first address, size, and handle.

    Args:
      address: in memory that was allocated by virtual memory management, by anyone here.
      device: the ordinal of the GPU.

    Returns:
      The first address and the size in bytes of what is mapped there, and a handle for `release`.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    with _context(device):
        pointer = ctypes.c_uint64(address)
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        start = ctypes.c_void_p(base.value)
        _call("cuMemRetainAllocationHandle", ctypes.byref(handle), start)
    return base.value, size.value, handle.value


def write(address: int, content: bytes, device: int) -> None:
    """Stores bytes of the host at an address, and waits until they are there.

    Args:
      address: of memory that is mapped for the GPU.
      content: the bytes.
      device: the ordinal of a GPU.
    """
    with _context(device):
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        _call("cuCtxSynchronize")


@contextlib.contextmanager
def _context(device: int) -> Iterator[None]:
    """Inside the block, the GPU's primary context, which is XLA's, is this thread's."""
    ordinal, context = _ordinal(device), ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", ordinal)


def _properties(device: int) -> _Properties:
    location = _Location(_LOCATION_DEVICE, _ordinal(device).value)
    return _Properties(_ALLOCATION_PINNED, _HANDLE_POSIX_FILE_DESCRIPTOR, location)


def _ordinal(device: int) -> ctypes.c_int:
    found = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(found), device)
    return found


def _call(function: str, *arguments: Any) -> None:
    """Calls a function of NVIDIA's driver.

    Raises:
      DriverError: if it fails.
    """
    driver = peer_access.cuda_driver()
    if driver is None:
        raise DriverError(f"{function}: NVIDIA's driver, libcuda.so.1, is not there")
    status = getattr(driver, function)(*arguments)
    if status != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        text = name.value.decode() if name.value else "an error without a name"
        raise DriverError(f"{function}: {text} ({status})")
