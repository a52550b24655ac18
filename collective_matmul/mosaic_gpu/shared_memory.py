"""Memory of all GPUs of a node that the processes of a program share, each with GPUs of its own.

All processes call `share` for the same devices. They go through these steps together. A step ends
in each of them when it has ended in all, so one that fails ends all of them with the same error:

1. *offer*: allocate and fill memory on the own devices, and listen at a Unix socket;
2. *send*: send a file descriptor of each own allocation to every other process;
3. *map*: import what has been received, map the allocations of all devices side by side, and tell
   the others at which address.

What they tell each other goes through the key-value store of `jax.distributed`: the addresses of
sockets and of memory. Every process has a range of addresses of its own. All know all ranges, so
that the table of addresses which is compiled into a program is the same in each of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from collective_matmul._compat import key_value_store
from collective_matmul.mosaic_gpu import virtual_memory
from collective_matmul.mosaic_gpu.timeout_reports import TIMEOUT_VARIABLE, timeout_seconds

# A name that begins so belongs to no file, and vanishes with its socket.
_ABSTRACT = "\0"
_TOKEN_BYTES = 16
# More than the devices of any node.
_MOST_DESCRIPTORS = 64
_FOR_EVER_SECONDS = 7 * 24 * 3600.0


class SharingError(RuntimeError):
    """The processes of a program cannot share memory; raised in each of them."""


class Store(Protocol):
    """A key-value store of all processes."""

    def key_value_set(self, key: str, value: str) -> None:
        """Sets a key.

        Raises:
          jax.errors.JaxRuntimeError: if it is set.
        """

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Returns the value of a key, when it is set.

        Raises:
          jax.errors.JaxRuntimeError: if it was not set in time.
        """
        ...


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
    ordered = tuple(sorted(devices, key=lambda device: device.id))
    with contextlib.ExitStack() as resources:
        return _Sharing(name, ordered, resources).run(size, content)


_trial_lock = threading.Lock()
# The answer of `unshared_reason`, once it is known.
_unshared: list[str | None] = []


def unshared_reason() -> str | None:
    """Returns why the processes of this program cannot share memory; None if they can.

    The first call shares a little memory to find out. It waits until every process has called it.
    All of them return the same, also if one of them was late: the first to know decides.
    """
    with _trial_lock:
        if not _unshared:
            _unshared.append(_agreed("memory/decision", _trial()) or None)
        return _unshared[0]


def _trial() -> str:
    """Returns why memory cannot be shared among all processes, or nothing."""
    try:
        memory = share("memory/trial", jax.devices(), 1, lambda device: b"\0")
    except SharingError as error:
        return str(error)
    memory.mapped.unmap()
    return ""


def _agreed(key: str, proposal: str) -> str:
    """Returns the proposal of the process that was the first to make one."""
    store: Store | None = key_value_store()
    if store is None:
        return proposal
    # If it is set already, another process was first.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        store.key_value_set(_key(key), proposal)
    return store.blocking_key_value_get(_key(key), 10_000)


class _Sharing:
    """One call of `share`."""

    def __init__(self, name: str, devices: tuple[Any, ...], resources: contextlib.ExitStack):
        """Describes the call.

        Args:
          name: see `share`.
          devices: the devices, in the order of their allocations.
          resources: what is closed and given up when the call ends.
        """
        self.name, self.devices, self.resources = name, devices, resources
        self.process = jax.process_index()
        self.processes = sorted({device.process_index for device in devices})
        self.others = [number for number in self.processes if number != self.process]
        self.own = [device for device in devices if device.process_index == self.process]
        self.ordinals = [device.local_hardware_id for device in self.own]
        self.seconds = timeout_seconds() or _FOR_EVER_SECONDS
        self.deadline = time.monotonic() + self.seconds
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        # Set in the first step.
        self.size = 0
        self.handles: list[int] = []
        self.listening: Any = None

    def run(self, size: int, content: Callable[[Any], bytes]) -> SharedMemory:
        """Goes through all steps."""
        offers = self.step("offer", lambda: self.offer(size, content))
        self.step("send", lambda: self.send(offers))
        with contextlib.ExitStack() as undo:
            ranges: list[virtual_memory.MappedRange] = []

            def map_all() -> int:
                ranges.append(self.map())
                undo.callback(ranges[0].unmap)
                return ranges[0].base

            bases = self.step("map", map_all)
            undo.pop_all()
        return SharedMemory(self.devices, bases, ranges[0])

    def step(self, name: str, act: Callable[[], Any]) -> dict[int, Any]:
        """Takes a step with all processes.

        Args:
          name: the name of the step.
          act: takes it here, and returns what the others are told.

        Returns:
          By process, what it has returned.

        Raises:
          SharingError: in all processes, if one of them failed.
        """
        store: Store | None = key_value_store()
        if store is None:
            raise SharingError("the processes were not connected by jax.distributed.initialize")
        try:
            answer = {"told": act()}
        except (OSError, RuntimeError) as error:
            answer = {"error": f"{error}"}
        keys = {n: _key(f"{self.name}/{name}/{n}") for n in self.processes}
        try:
            store.key_value_set(keys[self.process], json.dumps(answer))
        except jax.errors.JaxRuntimeError as error:
            raise SharingError(
                f"these processes tried before to share this memory: {error}"
            ) from error
        answers = {number: json.loads(self.answer(store, keys[number], number)) for number in keys}
        for number, each in answers.items():
            if "error" in each:
                raise SharingError(f"process {number}: {each['error']}")
        return {number: each["told"] for number, each in answers.items()}

    def answer(self, store: Store, key: str, process: int) -> str:
        """Returns what a process has told, when it has."""
        try:
            return store.blocking_key_value_get(key, int(self.seconds_left() * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise SharingError(
                f"process {process} has not come to the same place of the program within"
                f" {self.seconds:g} s; all processes must trace and compile the same programs."
                f" {TIMEOUT_VARIABLE} sets the seconds"
            ) from error

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline, never quite none."""
        return max(0.1, self.deadline - time.monotonic())

    def offer(self, size: int, content: Callable[[Any], bytes]) -> dict[str, str]:
        """Allocates and fills memory on the own devices, and listens."""
        for device in self.ordinals:
            if reason := virtual_memory.unsupported_reason(device):
                raise SharingError(reason)
        self.size = max(virtual_memory.rounded_size(size, device) for device in self.ordinals)
        for device, ordinal in zip(self.own, self.ordinals, strict=True):
            handle = virtual_memory.allocate(self.size, ordinal)
            self.handles.append(self.until_the_end(handle))
            mapped = virtual_memory.MappedRange([handle], self.size, [ordinal])
            try:
                virtual_memory.write(mapped.base, content(device), ordinal)
            finally:
                mapped.unmap()
        self.listening = self.resources.enter_context(_unix_socket())
        address = f"collective_matmul-{secrets.token_hex(16)}"
        self.listening.bind(_ABSTRACT + address)
        self.listening.listen()
        return {
            "address": address,
            "node": _node(),
            "token": self.token.hex(),
            "size": str(self.size),
        }

    def send(self, offers: Mapping[int, Mapping[str, str]]) -> None:
        """Sends descriptors of the own allocations to all others."""
        here = offers[self.process]
        for number in self.others:
            offer = offers[number]
            if offer["node"] != here["node"]:
                raise SharingError(f"process {number} runs on another node")
            if offer["size"] != here["size"]:
                raise SharingError(f"process {number} allocates in other units")
            with _unix_socket() as sending, _descriptors(self.handles) as descriptors:
                sending.settimeout(self.seconds_left())
                try:
                    sending.connect(_ABSTRACT + offer["address"])
                except OSError as error:
                    raise SharingError(
                        f"process {number} cannot be reached by a Unix socket ({error}), as from"
                        " another container; give both the network namespace of the host"
                    ) from error
                # It waits in the socket until the other process accepts.
                message = bytes.fromhex(offer["token"]) + self.process.to_bytes(4, "little")
                socket.send_fds(sending, [message], descriptors)

    def map(self) -> virtual_memory.MappedRange:
        """Receives the descriptors of all others, and maps the memory of all devices."""
        handles = {self.process: self.handles}
        while len(handles) < len(self.processes):
            number, received = self.receive()
            handles[number] = received
        in_turn = {number: iter(each) for number, each in handles.items()}
        ordered = [next(in_turn[device.process_index]) for device in self.devices]
        return virtual_memory.MappedRange(ordered, self.size, self.ordinals)

    def receive(self) -> tuple[int, list[int]]:
        """Returns the number of a process, and handles of the allocations that it has sent."""
        self.listening.settimeout(self.seconds_left())
        while True:
            connection, _ = self.listening.accept()
            with connection:
                connection.settimeout(self.seconds_left())
                message, descriptors, _, _ = socket.recv_fds(
                    connection, 2 * _TOKEN_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            with contextlib.ExitStack() as close:
                for descriptor in descriptors:
                    close.callback(os.close, descriptor)
                # Who does not know the token is not one of the processes.
                if message[:_TOKEN_BYTES] == self.token:
                    imported = map(virtual_memory.import_descriptor, descriptors)
                    handles = [self.until_the_end(handle) for handle in imported]
                    return int.from_bytes(message[_TOKEN_BYTES:], "little"), handles

    def until_the_end(self, handle: int) -> int:
        """Returns the handle, which is given up when the call ends."""
        self.resources.callback(virtual_memory.release, handle)
        return handle


def _node() -> str:
    """Returns what tells this node from others: containers of one node have it in common."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _key(name: str) -> str:
    return f"collective_matmul/{name}"


def _unix_socket() -> socket.socket:
    # A message is received whole, with its descriptors.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def _descriptors(handles: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors of allocations, inside the block."""
    with contextlib.ExitStack() as close:
        made = []
        for handle in handles:
            made.append(virtual_memory.export(handle))
            close.callback(os.close, made[-1])
        yield made
