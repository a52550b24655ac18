"""Processes of one node that give each other handles of memory.

They meet at the same place of the program and go through these steps together. A step ends in each
of them when it has ended in all, so one that fails ends all of them with the same error:

1. *offer*: make handles of memory on the own devices, and listen at a Unix socket;
2. *send*: send a file descriptor of each to every other process;
3. *map*: import what has been received, and do with it what the caller wants.

What they tell each other goes through the key-value store of `jax.distributed`. If there are
several nodes, each of them does all of that by itself (`on_all_nodes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from collective_matmul._compat import key_value_store
from collective_matmul.mosaic_gpu.peers import virtual_memory
from collective_matmul.mosaic_gpu.peers.timeout_reports import TIMEOUT_VARIABLE, timeout_seconds
from collective_matmul.transport import node_of

# A name that begins so belongs to no file, and vanishes with its socket.
_ABSTRACT = "\0"
_TOKEN_BYTES = 16
# More than the devices of any node.
_MOST_DESCRIPTORS = 64
_FOR_EVER_SECONDS = 7 * 24 * 3600.0
_NOT_CONNECTED = "the processes were not connected by jax.distributed.initialize"


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


def agreed(key: str, proposal: str) -> str:
    """Returns the proposal of the process that was the first to make one."""
    store: Store | None = key_value_store()
    if store is None:
        return proposal
    # If it is set already, another process was first.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        store.key_value_set(_key(key), proposal)
    return store.blocking_key_value_get(_key(key), 10_000)


def on_all_nodes(
    name: str, devices: Sequence[Any], act: Callable[[str, Sequence[Any]], Mapping[str, int]]
) -> dict[str, int]:
    """Acts on each node by itself, with the processes of that node alone.

    Every process of the devices calls this, with the same arguments and in the same order.

    Args:
      name: of the act, the same in all processes; can be used once.
      devices: the devices, of one node or of several.
      act: gets a name and the devices of this node; returns integers by keys that other nodes do
        not have, the same in all processes of the node.

    Returns:
      What the acts of all nodes have returned.

    Raises:
      SharingError: if one of the nodes fails or does not come in time.
    """
    process = jax.process_index()
    here = next(node_of(each) for each in devices if each.process_index == process)
    mine = [each for each in devices if node_of(each) == here]
    if len(mine) == len(devices):
        return dict(act(name, mine))
    try:
        answer = json.dumps({"found": dict(act(f"{name}/{here}", mine))})
    except SharingError as error:
        answer = json.dumps({"error": str(error)})
    agreed(f"{name}/nodes/{here}", answer)
    found: dict[str, int] = {}
    for node in sorted(set(map(node_of, devices))):
        told = json.loads(_told_by_node(f"{name}/nodes/{node}", node))
        if "error" in told:
            raise SharingError(f"node {node}: {told['error']}")
        found |= told["found"]
    return found


def _told_by_node(key: str, node: int) -> str:
    """Returns what the processes of a node have told, when one of them has."""
    store: Store | None = key_value_store()
    seconds = timeout_seconds() or _FOR_EVER_SECONDS
    if store is None:
        raise SharingError(_NOT_CONNECTED)
    try:
        return store.blocking_key_value_get(_key(key), int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise SharingError(
            f"no process of node {node} has come to the same place of the program within"
            f" {seconds:g} s. {TIMEOUT_VARIABLE} sets the seconds"
        ) from error


class ProcessGroup:
    """The processes of some devices, which meet once. A context manager, for the whole meeting.

    Attributes:
      devices: the devices, in the order in which handles are given.
      own: those of this process.
      ordinals: their numbers among the GPUs that this process sees.
    """

    def __init__(self, name: str, devices: Sequence[Any]):
        """Describes the group.

        Args:
          name: of the meeting, the same in all processes; can be used once.
          devices: the devices, in any order.
        """
        self.devices = tuple(sorted(devices, key=lambda device: device.id))
        self.process = jax.process_index()
        self.own = [device for device in self.devices if device.process_index == self.process]
        self.ordinals = [device.local_hardware_id for device in self.own]
        self._name = name
        self._processes = sorted({device.process_index for device in self.devices})
        self._others = [number for number in self._processes if number != self.process]
        self._seconds = timeout_seconds() or _FOR_EVER_SECONDS
        self._deadline = time.monotonic() + self._seconds
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._resources = contextlib.ExitStack()
        # Set in the first step.
        self._handles: list[int] = []
        self._listening: Any = None

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes what was opened, and gives up all handles: what is mapped stays."""
        self._resources.close()

    def meet(
        self,
        make_handles: Callable[[], tuple[Sequence[int], Any]],
        map_all: Callable[[Sequence[int], Mapping[int, Any]], Any],
    ) -> dict[int, Any]:
        """Goes through all steps.

        Args:
          make_handles: returns a handle for each of the own devices, see `released`, and anything
            that JSON can hold, to be told to the others.
          map_all: gets a handle for each device, and by process what was told. It returns what is
            told to the others in turn.

        Returns:
          By process, what `map_all` has returned.

        Raises:
          SharingError: in all processes, if one of them fails or does not come in time.
        """
        offers = self._step("offer", lambda: self._offer(make_handles))
        self._step("send", lambda: self._send(offers))
        told = {number: offer["told"] for number, offer in offers.items()}
        return self._step("map", lambda: map_all(self._receive_all(), told))

    def released(self, handle: int) -> int:
        """Returns the handle, which is given up after the meeting."""
        self._resources.callback(virtual_memory.release, handle)
        return handle

    def _step(self, name: str, act: Callable[[], Any]) -> dict[int, Any]:
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
            raise SharingError(_NOT_CONNECTED)
        try:
            answer = {"told": act()}
        except (OSError, RuntimeError) as error:
            answer = {"error": f"{error}"}
        keys = {number: _key(f"{self._name}/{name}/{number}") for number in self._processes}
        try:
            store.key_value_set(keys[self.process], json.dumps(answer))
        except jax.errors.JaxRuntimeError as error:
            raise SharingError(
                f"these processes tried before to share this memory: {error}"
            ) from error
        answers = {number: json.loads(self._answer(store, keys[number], number)) for number in keys}
        for number, each in answers.items():
            if "error" in each:
                raise SharingError(f"process {number}: {each['error']}")
        return {number: each["told"] for number, each in answers.items()}

    def _answer(self, store: Store, key: str, process: int) -> str:
        """Returns what a process has told, when it has."""
        try:
            return store.blocking_key_value_get(key, int(self._seconds_left() * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise SharingError(
                f"process {process} has not come to the same place of the program within"
                f" {self._seconds:g} s; all processes must trace and compile the same programs."
                f" {TIMEOUT_VARIABLE} sets the seconds"
            ) from error

    def _seconds_left(self) -> float:
        """Returns the seconds until the deadline, never quite none."""
        return max(0.1, self._deadline - time.monotonic())

    def _offer(self, make_handles: Callable[[], tuple[Sequence[int], Any]]) -> dict[str, Any]:
        """Makes handles, and listens."""
        for device in self.ordinals:
            if reason := virtual_memory.unsupported_reason(device):
                raise SharingError(reason)
        handles, told = make_handles()
        self._handles = list(handles)
        self._listening = self._resources.enter_context(_unix_socket())
        address = f"collective_matmul-{secrets.token_hex(16)}"
        self._listening.bind(_ABSTRACT + address)
        self._listening.listen()
        return {"address": address, "node": _node(), "token": self._token.hex(), "told": told}

    def _send(self, offers: Mapping[int, Mapping[str, Any]]) -> None:
        """Sends descriptors of the own handles to all others."""
        for number in self._others:
            if offers[number]["node"] != offers[self.process]["node"]:
                raise SharingError(f"process {number} runs on another node")
            with _unix_socket() as sending, _descriptors(self._handles) as descriptors:
                sending.settimeout(self._seconds_left())
                try:
                    sending.connect(_ABSTRACT + offers[number]["address"])
                except OSError as error:
                    raise SharingError(
                        f"process {number} cannot be reached by a Unix socket ({error}), as from"
                        " another container; give both the network namespace of the host"
                    ) from error
                # It waits in the socket until the other process accepts.
                token = bytes.fromhex(offers[number]["token"])
                message = token + self.process.to_bytes(4, "little")
                socket.send_fds(sending, [message], descriptors)

    def _receive_all(self) -> list[int]:
        """Returns handles of the memory of all devices."""
        handles = {self.process: self._handles}
        while len(handles) < len(self._processes):
            number, received = self._receive()
            handles[number] = received
        in_turn = {number: iter(each) for number, each in handles.items()}
        return [next(in_turn[device.process_index]) for device in self.devices]

    def _receive(self) -> tuple[int, list[int]]:
        """Returns the number of a process, and the handles that it has sent."""
        self._listening.settimeout(self._seconds_left())
        while True:
            connection, _ = self._listening.accept()
            with connection:
                connection.settimeout(self._seconds_left())
                message, descriptors, _, _ = socket.recv_fds(
                    connection, 2 * _TOKEN_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            with contextlib.ExitStack() as close:
                for descriptor in descriptors:
                    close.callback(os.close, descriptor)
                # Who does not know the token is not one of the processes.
                if message[:_TOKEN_BYTES] == self._token:
                    imported = map(virtual_memory.import_descriptor, descriptors)
                    handles = [self.released(handle) for handle in imported]
                    return int.from_bytes(message[_TOKEN_BYTES:], "little"), handles


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
