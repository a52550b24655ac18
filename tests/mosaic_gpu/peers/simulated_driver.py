"""NVIDIA's driver as far as shared memory needs it, simulated by memory of the host.

An allocation is an anonymous file. Its handle and what is exported are descriptors of the file, and
to map the allocation is to map the file. So processes that run this share memory as those with GPUs
do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 0, 1, 2, 801
_NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED",
}
GRANULARITY = 1 << 16

_PROT_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x10, 0x100000, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _value(argument: Any) -> int:
    return getattr(argument, "value", argument) or 0


def _target(argument: Any) -> Any:
    """The object that `ctypes.byref` refers to."""
    return argument._obj


class SimulatedDriver:
    """The functions of libcuda.so.1, which return a status.

    Attributes:
      calls: names of the functions that were called, in order.
      failures: a status for functions that are to fail.
      contexts: the current contexts of this thread, the innermost last.
      reserved: sizes of reserved ranges, by address.
      whole_ranges: addresses and sizes of what was reserved for them, aligned or not.
      handles: descriptors of allocations that are not released.
      mapped: sizes of mapped ranges, and descriptors of what is mapped there, by address.
    """

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.calls: list[str] = []
        self.failures: dict[str, int] = {}
        self.contexts: list[int] = []
        self.reserved: dict[int, int] = {}
        self.whole_ranges: dict[int, tuple[int, int]] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failures:
                return self.failures[name]
            return getattr(self, "_" + name)(*arguments) or SUCCESS

        return call

    def _cuInit(self, flags: Any) -> None:
        assert _value(flags) == 0

    def _cuGetErrorName(self, status: Any, text: Any) -> None:
        _target(text).value = _NAMES.get(_value(status), b"CUDA_ERROR_UNKNOWN")

    def _cuDeviceGet(self, device: Any, number: Any) -> int:
        _target(device).value = _value(number)
        return SUCCESS if _value(number) < self.devices else INVALID_VALUE

    def _cuDeviceGetCount(self, count: Any) -> None:
        _target(count).value = self.devices

    def _cuDriverGetVersion(self, version: Any) -> None:
        _target(version).value = 13000

    def _cuDeviceGetAttribute(self, result: Any, attribute: Any, device: Any) -> None:
        assert _value(device) < self.devices
        _target(result).value = int(_value(attribute) in (102, 103))

    def _cuDeviceCanAccessPeer(self, result: Any, one: Any, other: Any) -> None:
        _target(result).value = int(_value(one) != _value(other))

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        _target(context).value = 1000 + _value(device)

    def _cuDevicePrimaryCtxRelease_v2(self, device: Any) -> None:
        assert _value(device) < self.devices

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.contexts.append(_value(context))

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        _target(context).value = self.contexts.pop()

    def _cuCtxSynchronize(self) -> None:
        assert self.contexts

    def _cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: Any) -> None:
        _target(size).value = GRANULARITY

    def _cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        if _value(size) % GRANULARITY:
            return INVALID_VALUE
        fd = os.memfd_create("allocation")
        os.ftruncate(fd, _value(size))
        self.handles.add(fd)
        _target(handle).value = fd
        return SUCCESS

    def _cuMemExportToShareableHandle(
        self, shareable: Any, handle: Any, kind: Any, flags: Any
    ) -> None:
        assert _value(handle) in self.handles and _value(kind) == 1
        _target(shareable).value = os.dup(_value(handle))

    def _cuMemImportFromShareableHandle(self, handle: Any, shareable: Any, kind: Any) -> None:
        assert _value(kind) == 1
        fd = os.dup(_value(shareable))
        self.handles.add(fd)
        _target(handle).value = fd

    def _cuMemAddressReserve(
        self, pointer: Any, size: Any, alignment: Any, hint: Any, flags: Any
    ) -> int:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        length = _value(size) + GRANULARITY
        address = _libc.mmap(_value(hint), length, _PROT_NONE, kind, -1, 0)
        if address == _FAILED:
            return OUT_OF_MEMORY
        aligned = -(-address // GRANULARITY) * GRANULARITY
        self.reserved[aligned] = _value(size)
        self.whole_ranges[aligned] = address, length
        _target(pointer).value = aligned
        return SUCCESS

    def _cuMemAddressFree(self, pointer: Any, size: Any) -> None:
        assert self.reserved.pop(_value(pointer)) == _value(size)
        address, length = self.whole_ranges.pop(_value(pointer))
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))

    def _cuMemMap(self, pointer: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert _value(handle) in self.handles
        kind = mmap.MAP_SHARED | _MAP_FIXED
        address = _libc.mmap(
            _value(pointer), _value(size), _PROT_NONE, kind, _value(handle), _value(offset)
        )
        # What is mapped outlives its handles.
        self.mapped[_value(pointer)] = _value(size), os.dup(_value(handle))
        return SUCCESS if address == _value(pointer) else INVALID_VALUE

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:
        assert self.contexts
        for address, (length, _) in self.mapped.items():
            if address <= _value(pointer) < address + length:
                _target(base).value, _target(size).value = address, length
                return SUCCESS
        return INVALID_VALUE

    def _cuMemRetainAllocationHandle(self, handle: Any, address: Any) -> None:
        fd = os.dup(self.mapped[_value(address)][1])
        self.handles.add(fd)
        _target(handle).value = fd

    def _cuMemSetAccess(self, pointer: Any, size: Any, access: Any, count: Any) -> int:
        failed = _libc.mprotect(
            ctypes.c_void_p(_value(pointer)), ctypes.c_size_t(_value(size)), _READ_WRITE
        )
        return INVALID_VALUE if failed else SUCCESS

    def _cuMemUnmap(self, pointer: Any, size: Any) -> None:
        length, fd = self.mapped.pop(_value(pointer))
        assert length == _value(size)
        os.close(fd)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _libc.mmap(_value(pointer), _value(size), _PROT_NONE, kind, -1, 0)

    def _cuMemRelease(self, handle: Any) -> None:
        self.handles.remove(_value(handle))
        os.close(_value(handle))

    def _cuMemsetD8_v2(self, pointer: Any, byte: Any, size: Any) -> None:
        ctypes.memset(_value(pointer), _value(byte), _value(size))

    def _cuMemcpyHtoD_v2(self, pointer: Any, source: Any, size: Any) -> None:
        ctypes.memmove(ctypes.c_void_p(_value(pointer)), source, _value(size))

    def _cuMemcpyDtoH_v2(self, target: Any, pointer: Any, size: Any) -> None:
        ctypes.memmove(target, ctypes.c_void_p(_value(pointer)), _value(size))

    def _cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        ctypes.memmove(
            ctypes.c_void_p(_value(target)), ctypes.c_void_p(_value(source)), _value(size)
        )
