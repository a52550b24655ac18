"""Memory that processes share: here threads that take themselves for processes of one node.

The driver is simulated by memory of the host, which each of them maps for itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from collective_matmul import peer_access
from collective_matmul.mosaic_gpu import requirements
from collective_matmul.mosaic_gpu.peers import (
    process_group,
    shared_memory,
    symmetric_workspace,
    timeout_reports,
    virtual_memory,
)
from collective_matmul.mosaic_gpu.peers.process_group import (
    ProcessGroup,
    SharingError,
    on_all_nodes,
)
from collective_matmul.mosaic_gpu.peers.shared_memory import (
    Pools,
    SharedMemory,
    SharedOnNodes,
    share,
    share_on_nodes,
    share_pools,
)
from collective_matmul.mosaic_gpu.peers.timeout_reports import TIMEOUT_VARIABLE
from tests.mosaic_gpu.peers.simulated_driver import (
    GRANULARITY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SimulatedDriver,
)
from tests.mosaic_gpu.peers.simulated_workspaces import assert_initial
from tests.mosaic_gpu.peers.two_processes import run_two_processes

Patch = pytest.MonkeyPatch

FUNCTIONS = (
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyHtoD_v2",
    "cuDevicePrimaryCtxRetain",
)


@dataclass(frozen=True)
class Device:
    """A device as JAX describes it to every process; its number is one of its own process."""

    id: int
    process_index: int
    local_hardware_id: int
    slice_index: int = 0


class Store:
    """The key-value store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


class Node:
    """Processes of one node, which are threads here.

    Attributes:
      devices: all devices, in an order that mixes those of different processes.
      drivers: of each process.
    """

    def __init__(self, counts: Sequence[int], monkeypatch: Patch):
        self.processes = range(len(counts))
        pairs = [(p, n) for p, count in enumerate(counts) for n in range(count)]
        pairs.sort(key=lambda pair: pair[1])
        self.devices = tuple(Device(10 + i, p, n) for i, (p, n) in enumerate(pairs))
        self.drivers = [SimulatedDriver(count) for count in counts]
        self.store = Store()
        self.nodes = ["one"] * len(counts)
        self.here = threading.local()
        monkeypatch.setattr(jax, "process_index", lambda: self.here.process)
        monkeypatch.setattr(jax, "devices", lambda: list(self.devices))
        monkeypatch.setattr(peer_access, "cuda_driver", lambda: self.drivers[self.here.process])
        monkeypatch.setattr(process_group, "key_value_store", lambda: self.store)
        monkeypatch.setattr(process_group, "_node", lambda: self.nodes[self.here.process])
        monkeypatch.setenv(TIMEOUT_VARIABLE, "30")

    def divide(self, nodes: Sequence[int]) -> None:
        """Places the processes on several nodes."""
        self.nodes = [f"node {number}" for number in nodes]
        self.devices = tuple(replace(d, slice_index=nodes[d.process_index]) for d in self.devices)

    def run(self, act: Callable[[int], Any], processes: Sequence[int] | None = None) -> list[Any]:
        """Returns what `act` returns, or the error that it raises, in each process."""

        def one(process: int) -> Any:
            self.here.process = process
            try:
                return act(process)
            except (RuntimeError, ValueError) as error:
                return error

        chosen = self.processes if processes is None else processes
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(one, chosen))

    def share(self, size: int = 1000, name: str = "memory") -> list[Any]:
        def content(device: Device) -> bytes:
            assert device.process_index == self.here.process
            return bytes([device.id]) * size

        # The order in which a process names the devices does not matter.
        return self.run(
            lambda process: share(name, self.devices[:: 1 - 2 * (process % 2)], size, content)
        )

    def assert_nothing_is_left(self) -> None:
        for driver in self.drivers:
            assert not driver.reserved and not driver.handles and not driver.contexts


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def errors(outcomes: Sequence[Any]) -> list[str]:
    assert all(isinstance(each, SharingError) for each in outcomes), outcomes
    return [str(each) for each in outcomes]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 3, 2), (1,) * 8], ids=str)
def test_all_processes_see_all_memory(counts: tuple[int, ...], monkeypatch: Patch) -> None:
    node, size = Node(counts, monkeypatch), GRANULARITY + 1000
    files = open_files()
    shared: list[SharedMemory] = node.share(size)
    assert len({frozenset(each.bases.items()) for each in shared}) == 1
    assert len(set(shared[0].bases.values())) == len(counts)
    for process, device in np.ndindex(len(counts), len(node.devices)):
        owner = node.devices[device]
        memory = _memory(shared[process].address(owner, process), size)
        # Nobody has written more than its owner, and the others what follows here.
        assert set(memory[process + 1 :]) <= {owner.id, *range(100, 100 + process)}
        assert memory[-1] == owner.id
        memory[process] = 100 + process
    for process, device in np.ndindex(len(counts), len(node.devices)):
        address = shared[process].address(node.devices[device], process)
        assert list(_memory(address, len(counts))) == [100 + p for p in node.processes]
    # Only the mapping is kept: it keeps the memory.
    for process, driver in enumerate(node.drivers):
        assert list(driver.reserved) == [shared[process].bases[process]]
        assert not driver.contexts and not driver.handles
    node.run(lambda process: shared[process].mapped.unmap())
    node.assert_nothing_is_left()
    assert open_files() == files


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_one_is_the_error_of_all(
    function: str, failing: int, monkeypatch: Patch
) -> None:
    node, files = Node((1, 2, 1), monkeypatch), open_files()
    node.drivers[failing].failures[function] = OUT_OF_MEMORY
    found = errors(node.share())
    assert found == [f"process {failing}: {function}: CUDA_ERROR_OUT_OF_MEMORY (2)"] * 3
    node.assert_nothing_is_left()
    assert open_files() == files


def test_a_gpu_without_the_feature_is_named(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)

    def lacks(result: Any, attribute: Any, device: Any) -> None:
        result._obj.value = int(attribute != 103)

    monkeypatch.setattr(node.drivers[1], "_cuDeviceGetAttribute", lacks)
    reason = "process 1: GPU 0 has no memory that is exported as a file descriptor"
    assert errors(node.share()) == [reason] * 2


def test_processes_of_other_nodes_are_named(monkeypatch: Patch) -> None:
    node = Node((1, 1, 1), monkeypatch)
    node.nodes[2] = "another"
    # All of them find that; the first is reported.
    assert errors(node.share()) == ["process 0: process 2 runs on another node"] * 3
    node.assert_nothing_is_left()


def of_nodes(node: Node, processes: Sequence[int] | None = None) -> list[Any]:
    """Memory on all devices, filled with their numbers, as each process has it."""
    share = lambda _: share_on_nodes("all", node.devices, 100, lambda d: bytes([d.id]) * 100)  # noqa: E731
    return node.run(share, processes)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 2, 0)], ids=str)
def test_each_node_shares_by_itself(nodes: tuple[int, ...], monkeypatch: Patch) -> None:
    """All know all addresses; nobody has one of another node."""
    node, files = Node((1, 2, 1, 1), monkeypatch), open_files()
    node.divide(nodes)
    shared: list[SharedOnNodes] = of_nodes(node)
    assert all(isinstance(each, SharedOnNodes) for each in shared), shared
    assert all(each.addresses == shared[0].addresses for each in shared)
    for process, device in itertools.product(node.processes, node.devices):
        if nodes[process] == device.slice_index:
            assert _memory(shared[3 - process].address(device, process), 100)[99] == device.id
        else:
            with pytest.raises(SharingError, match="on another node than process"):
                shared[process].address(device, process)
    node.run(lambda process: shared[process].mapped[0].mapped.unmap())
    node.assert_nothing_is_left()
    assert open_files() == files


def test_the_error_of_one_node_is_the_error_of_all(monkeypatch: Patch) -> None:
    node = Node((1, 1, 1, 1), monkeypatch)
    node.divide((0, 0, 1, 1))
    node.drivers[3].failures["cuMemCreate"] = OUT_OF_MEMORY
    reason = "node 1: process 3: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert errors(of_nodes(node)) == [reason] * 4


def test_a_node_that_does_not_come(monkeypatch: Patch) -> None:
    node = Node((1, 1, 1), monkeypatch)
    node.divide((0, 0, 1))
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    for sentence in errors(of_nodes(node, [0, 1])):
        assert sentence.startswith("no process of node 1 has come to the same place")


def test_arrays_of_all_nodes_have_translations(monkeypatch: Patch) -> None:
    node = Node((1, 1, 1, 1), monkeypatch)
    node.divide((0, 0, 1, 1))
    xla = XlaPools(node, monkeypatch)
    mapped: dict[int, Pools] = {}

    def map_pools(name: str, devices: Sequence[Any]) -> dict[str, int]:
        mapped[node.here.process] = pools = share_pools(name, devices)
        return {str(n): t for n, t in pools.translations.items()}

    found = node.run(lambda _: on_all_nodes("pools", node.devices, map_pools))
    assert all(each.keys() == {"10", "11", "12", "13"} for each in found), found
    assert all(each == found[0] for each in found)
    node.run(lambda process: mapped[process].unmap())
    node.run(lambda process: xla.pools[10 + process].unmap())
    node.assert_nothing_is_left()


def test_sockets_of_other_containers_are_explained(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    offer = ProcessGroup._offer

    def elsewhere(self: Any, *arguments: Any) -> dict[str, str]:
        return {**offer(self, *arguments), "address": "a socket of another network namespace"}

    monkeypatch.setattr(ProcessGroup, "_offer", elsewhere)
    expected = r"^process 0: process 1 cannot be reached by a Unix socket \(.* refused\), as from"
    for sentence in errors(node.share()):
        assert re.match(expected, sentence)
    node.assert_nothing_is_left()


def test_a_process_that_does_not_come(monkeypatch: Patch) -> None:
    node = Node((1, 1, 1), monkeypatch)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    act = lambda _: share("memory", node.devices, 100, lambda device: b"")  # noqa: E731
    expected = (
        "process 1 has not come to the same place of the program within 0.3 s; all processes must"
        f" trace and compile the same programs. {TIMEOUT_VARIABLE} sets the seconds"
    )
    assert errors(node.run(act, [0, 2])) == [expected] * 2
    node.assert_nothing_is_left()


def test_a_name_is_of_one_memory(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    for each in node.share():
        assert isinstance(each, SharedMemory)
    for sentence in errors(node.share()):
        assert sentence.startswith("these processes tried before to share this memory: ")
    assert isinstance(node.share(name="other")[0], SharedMemory)


def test_strangers_are_ignored(monkeypatch: Patch) -> None:
    """Whoever connects to the socket without the token, with a descriptor or without."""
    node = Node((1, 1), monkeypatch)
    send = ProcessGroup._send

    def and_before_it_a_stranger(self: Any, offers: Mapping[int, Mapping[str, str]]) -> None:
        for descriptors in ([], [0]):
            with process_group._unix_socket() as stranger:
                for number in self._others:
                    stranger.connect("\0" + offers[number]["address"])
                socket.send_fds(stranger, [b"x" * 20], descriptors)
        send(self, offers)

    monkeypatch.setattr(ProcessGroup, "_send", and_before_it_a_stranger)
    for process, each in enumerate(node.share()):
        values = [_memory(each.address(device, process), 1)[0] for device in node.devices]
        assert values == [device.id for device in node.devices]


def test_without_a_store_nothing_is_shared(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    monkeypatch.setattr(process_group, "key_value_store", lambda: None)
    assert set(errors(node.share())) == {
        "the processes were not connected by jax.distributed.initialize"
    }


def test_the_first_process_decides(monkeypatch: Patch) -> None:
    """So all decide the same, also if one came too late for the others."""
    node = Node((1, 1), monkeypatch)
    (late,) = node.run(lambda _: process_group.agreed("decision", "process 1 was late"), [0])
    (other,) = node.run(lambda _: process_group.agreed("decision", ""), [1])
    assert late == other == "process 1 was late"


def test_the_reason_is_found_once(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    monkeypatch.setattr(shared_memory, "_unshared", {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    asked: list[str] = []

    def fail(name: str, *_: Any) -> None:
        asked.append(name)
        if name == "pools":
            raise SharingError("process 1 runs on another node")

    monkeypatch.setattr(shared_memory, "share_pools", fail)
    monkeypatch.setattr(
        shared_memory, "share", lambda *arguments: fail(*arguments) or mock.MagicMock()
    )
    for _ in range(2):
        assert node.run(lambda _: requirements.workspaces_reason("nccl"), [0]) == [None]
        (reason,) = node.run(lambda _: requirements.peer_arrays_reason("nccl"), [0])
        assert reason == (
            "2 processes: these kernels address peers' memory, which these processes cannot share:"
            " process 1 runs on another node; a single process with all GPUs of a node need not"
        )
    assert asked == ["memory/trial", "pools"]


class XlaPools:
    """XLA's memory on the devices of a node, at any addresses of their processes."""

    def __init__(self, node: Node, monkeypatch: Patch, limit: int = 4 * GRANULARITY):
        self.node, self.limit = node, limit
        self.pools: dict[int, virtual_memory.MappedRange] = {}
        monkeypatch.setattr(shared_memory, "_any_address", lambda d: self.pools[d.id].base + 1000)
        monkeypatch.setattr(shared_memory, "_pool_bytes", lambda device: self.limit)
        # These processes have one address space.
        monkeypatch.setattr(
            shared_memory,
            "_pool_base",
            lambda place: (place + 1 + 16 * node.here.process) << 40,
        )
        node.run(self.allocate)

    def allocate(self, process: int) -> None:
        for device in self.node.devices:
            if device.process_index == process:
                # A pool may be larger than what was asked for.
                size, number = (5 + device.id % 2) * GRANULARITY, device.local_hardware_id
                handle = virtual_memory.allocate(size, number)
                self.pools[device.id] = virtual_memory.MappedRange([handle], size, [number])
                virtual_memory.release(handle)


def test_arrays_of_peers_are_found(monkeypatch: Patch) -> None:
    node, files = Node((1, 2, 1), monkeypatch), open_files()
    xla = XlaPools(node, monkeypatch)
    shared: list[Pools] = node.run(lambda _: share_pools("pools", node.devices))
    assert all(isinstance(each, Pools) for each in shared), shared
    for process, device in np.ndindex(3, len(node.devices)):
        owner = node.devices[device]
        pool = xla.pools[owner.id]
        array = pool.base + 3 * GRANULARITY + 16 * process
        translated = (array + shared[process].translations[owner.id]) % (1 << 64)
        _memory(translated, 1)[0] = 1 + process
        assert _memory(array, 1)[0] == 1 + process
        _memory(array, 1)[0] = 100
        assert _memory(translated, 1)[0] == 100
    node.run(lambda process: shared[process].unmap())
    for device in node.devices:
        node.run(lambda _, device=device: xla.pools[device.id].unmap(), [device.process_index])
    node.assert_nothing_is_left()
    assert open_files() == files


def test_pools_that_grow_are_refused(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    XlaPools(node, monkeypatch, limit=100 * GRANULARITY)
    for sentence in errors(node.run(lambda _: share_pools("pools", node.devices))):
        assert sentence.startswith("process 0: XLA allocates memory on Device(id=10")
        assert "XLA_PYTHON_CLIENT_PREALLOCATE" in sentence


@pytest.mark.parametrize(
    "function",
    ["cuMemGetAddressRange_v2", "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle"],
)
def test_pools_that_nobody_may_map_are_refused(function: str, monkeypatch: Patch) -> None:
    """Pools of cudaMalloc cannot be mapped, nor can allocations that may not be exported."""
    node = Node((1, 1), monkeypatch)
    XlaPools(node, monkeypatch)
    node.drivers[1].failures[function] = NOT_SUPPORTED
    expected = f"process 1: {function}: CUDA_ERROR_NOT_SUPPORTED (801)"
    assert errors(node.run(lambda _: share_pools("pools", node.devices))) == [expected] * 2


def test_addresses_that_are_taken_are_refused(monkeypatch: Patch) -> None:
    node = Node((1, 1), monkeypatch)
    xla = XlaPools(node, monkeypatch)
    taken = xla.pools[10].base
    bases = {0: taken, 1: 1 << 41}
    monkeypatch.setattr(shared_memory, "_pool_base", lambda place: bases[place])
    expected = f"process 0: cuMemAddressReserve: address {taken:#x} is in use"
    assert errors(node.run(lambda _: share_pools("pools", node.devices))) == [expected] * 2
    for process, driver in enumerate(node.drivers):
        assert list(driver.reserved) == [xla.pools[10 + process].base]


def test_a_process_that_was_late_has_no_pools(monkeypatch: Patch) -> None:
    """The others have decided for all that pools are mapped; it fails rather than differ."""
    node = Node((1, 1), monkeypatch)
    monkeypatch.setattr(shared_memory, "_unshared", {"pools": None})
    monkeypatch.setattr(shared_memory, "_translations", {})
    (error,) = errors(node.run(lambda _: shared_memory.pool_translation(node.devices[0]), [0]))
    assert error == "this process was too late to map the memory of the others"


@pytest.mark.parametrize(("shape", "axis"), [((4,), 0), ((2, 2), 0), ((2, 2), 1), ((1, 4), 1)])
def test_workspaces_of_several_processes(
    shape: tuple[int, ...], axis: int, monkeypatch: Patch
) -> None:
    """One table in all; each device has addresses of its own process, and all reach the same."""
    node = Node((2, 2), monkeypatch)
    monkeypatch.setattr(symmetric_workspace, "EXCHANGE_BLOCKS", 2)
    monkeypatch.setattr(timeout_reports, "allocate", lambda device: 1 << 40 | device.id)
    devices = np.array([*node.devices, None], dtype=object)[:-1].reshape(shape)
    name, size = "test", symmetric_workspace.workspace_bytes(shape[axis])
    shared = node.run(
        lambda _: share(
            name,
            node.devices,
            size,
            lambda device: symmetric_workspace._initial(size, shape[axis], device).tobytes(),
        )
    )
    tables = []
    for process in node.processes:
        node.here.process = process
        monkeypatch.setattr(symmetric_workspace, "_allocate", lambda *_, p=process: shared[p])
        tables.append(symmetric_workspace._PointerTable(axis)(devices))
    np.testing.assert_array_equal(*tables)
    assert tables[0].shape == (*shape, shape[axis], 2) and tables[0].dtype == np.int32
    for place, device in np.ndenumerate(devices):
        along = np.moveaxis(devices, axis, -1)[(*place[:axis], *place[axis + 1 :])]
        addresses = [int(each) for each in tables[0][place].view(np.uint64)[:, 0]]
        for address, owner in zip(addresses, along, strict=True):
            assert shared[0].address(owner, device.process_index) == address
            words = np.frombuffer(_memory(address, size), np.int32)
            assert_initial(words, shape[axis])
            assert int(words[-2:].view(np.uint64)[0]) == 1 << 40 | owner.id


def test_meshes_of_several_processes_share(monkeypatch: Patch) -> None:
    """Workspaces of another axis, or of another order of devices, have a name of their own."""
    node = Node((1, 1), monkeypatch)
    names: list[str] = []

    def record(name: str, devices: Any, size: int, content: Any) -> Any:
        assert size == symmetric_workspace.workspace_bytes(2)
        names.append(name)
        return name

    monkeypatch.setattr(shared_memory, "share_on_nodes", record)
    monkeypatch.setattr(symmetric_workspace, "_allocated", {})
    one, other = node.devices
    for devices, shape, axis in [
        ((one, other), (2,), 0),
        ((other, one), (2,), 0),
        ((one, other), (1, 2), 1),
        ((one, other), (2,), 0),
    ]:
        name: Any = symmetric_workspace._allocate(devices, shape, axis)
        assert name == symmetric_workspace._shared_name(devices, shape, axis)
    assert len(names) == len(set(names)) == 3


def test_errors_of_the_driver_have_names(monkeypatch: Patch) -> None:
    driver = SimulatedDriver()
    monkeypatch.setattr(peer_access, "cuda_driver", lambda: driver)
    driver.failures["cuMemCreate"] = NOT_SUPPORTED
    expected = r"^cuMemCreate: CUDA_ERROR_NOT_SUPPORTED \(801\)$"
    with pytest.raises(virtual_memory.DriverError, match=expected):
        virtual_memory.allocate(GRANULARITY, 0)
    monkeypatch.setattr(peer_access, "cuda_driver", lambda: None)
    assert virtual_memory.unsupported_reason(0) == ("NVIDIA's driver, libcuda.so.1, is not there")


@pytest.mark.exhaustive
def test_two_processes_share_workspaces() -> None:
    """Real processes, connected by `jax.distributed`."""
    run_two_processes()
