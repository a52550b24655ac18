"""Where devices leave messages for each other, and how programs come to know the addresses."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul._compat import device_constant
from collective_matmul.mosaic_gpu.peers import rendezvous, symmetric_workspace, timeout_reports
from collective_matmul.mosaic_gpu.peers.peer_memory import VECTOR_BYTES
from collective_matmul.mosaic_gpu.peers.rendezvous import MAX_BUFFERS, POINTER_BYTES
from tests.mosaic_gpu.peers.simulated_workspaces import assert_initial

Patch = pytest.MonkeyPatch

#: A number that addresses of records begin with.
RECORD = 1 << 50

both_vma = pytest.mark.parametrize("check_vma", [False, True])


@pytest.mark.parametrize("devices", range(2, 9))
def test_nothing_overlaps(devices: int) -> None:
    """Epochs, messages of every phase, source and block, and mailboxes."""
    blocks, rendezvous_blocks = (
        np.arange(symmetric_workspace.EXCHANGE_BLOCKS),
        np.arange(symmetric_workspace.RENDEZVOUS_BLOCKS),
    )
    sources = list(itertools.product(range(symmetric_workspace.PHASES), range(devices)))
    mailbox = MAX_BUFFERS * POINTER_BYTES
    places = [
        (symmetric_workspace.epoch_offset(blocks), 4),
        *(
            (
                symmetric_workspace.region_offset(devices, *source, blocks),
                symmetric_workspace.REGION_BYTES,
            )
            for source in sources
        ),
        *(
            (symmetric_workspace.mailbox_offset(devices, *source, rendezvous_blocks), mailbox)
            for source in sources
        ),
        (
            symmetric_workspace.mailbox_offset(devices, 0, 0, rendezvous_blocks)
            + rendezvous._EPOCH_OFFSET,
            4,
        ),
        (np.array([symmetric_workspace.report_offset(devices)]), symmetric_workspace.REPORT_BYTES),
    ]
    starts = np.concatenate([offsets for offsets, _ in places])
    sizes = np.concatenate([np.full_like(offsets, size) for offsets, size in places])
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    assert starts.min() >= 0
    assert np.all(ends[:-1] <= starts[order][1:])
    # Offsets are int32, and the words are int32 too.
    assert ends[-1] <= symmetric_workspace.workspace_bytes(devices) < 1 << 31
    assert symmetric_workspace.workspace_bytes(devices) % 4 == 0
    # Except the epochs of rendezvous, which follow the pointers of a mailbox.
    assert not np.any(starts[: -rendezvous_blocks.size - 1] % VECTOR_BYTES)
    assert starts[-1] % VECTOR_BYTES == 0


class Device:
    """A device with an identity, which is all that a workspace of one process needs."""

    process_index = 0


class Space:
    """A workspace at some address."""

    def __init__(self, device: Any, pointer: int):
        self.device, self.pointer = device, pointer

    def unsafe_buffer_pointer(self) -> int:
        return self.pointer


@pytest.fixture
def _few_blocks(monkeypatch: Patch) -> None:
    """Workspaces that are made are small, and of one test alone."""
    monkeypatch.setattr(symmetric_workspace, "EXCHANGE_BLOCKS", 2)
    monkeypatch.setattr(symmetric_workspace, "_allocated", {})


@pytest.fixture
def spaces(_few_blocks: None, monkeypatch: Patch) -> list[Space]:
    """Spaces made since, at addresses above 4 GiB; every other one has a negative lower half."""
    made: list[Space] = []

    def put(value: np.ndarray, device: Any) -> Space:
        assert value.dtype == np.int32
        sizes = {symmetric_workspace.workspace_bytes(count): count for count in range(1, 9)}
        assert_initial(value, sizes[value.nbytes])
        assert int(value[-2:].view(np.uint64)[0]) == RECORD + id(device)
        space = Space(device, 0xFFF0_0000_0000_0000 + (len(made) + 1) * 0x8000_0010)
        made.append(space)
        return space

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(timeout_reports, "allocate", lambda device: RECORD + id(device))
    return made


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2), (2, 1, 3), (2, 3, 4)], ids=str)
def test_each_device_knows_those_along_its_axis(
    shape: tuple[int, ...], spaces: list[Space]
) -> None:
    devices = np.array([Device() for _ in range(math.prod(shape))]).reshape(shape)
    used: set[int] = set()
    for axis, size in enumerate(shape):
        before = len(spaces)
        table = symmetric_workspace._PointerTable(axis)(devices)
        assert table.shape == (*shape, size, 2) and table.dtype == np.int32
        pointers = {space.device: space.pointer for space in spaces[before:]}
        for place in np.ndindex(shape):
            along = [devices[(*place[:axis], n, *place[axis + 1 :])] for n in range(size)]
            words = table[place].view(np.uint32).tolist()
            found = [low + (high << 32) for low, high in words]
            assert found == [pointers[device] for device in along]
        assert used.isdisjoint(pointers.values())
        used |= set(pointers.values())


class Watched:
    """A lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self.lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.awaited.set()
            self.lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self.lock.release()


def test_threads_that_lower_at_once_share_workspaces(
    spaces: list[Space], monkeypatch: Patch
) -> None:
    lock, put = Watched(), jax.device_put

    def put_when_another_waits(*arguments: Any) -> Any:
        assert lock.awaited.wait(timeout=20)
        return put(*arguments)

    monkeypatch.setattr(symmetric_workspace, "_allocation_lock", lock)
    monkeypatch.setattr(jax, "device_put", put_when_another_waits)
    devices = (Device(), Device(), Device())
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: symmetric_workspace._allocate(devices, (3,), 0), range(2))
    assert one is other
    found = [one.address(device, 0) for device in devices]
    assert found == [space.pointer for space in spaces] and len(spaces) == 3


def mesh_of(sizes: tuple[int, ...], seed: int = 0) -> Mesh:
    """A mesh of devices in some order."""
    order = np.random.default_rng(seed).permutation(len(jax.devices()))
    devices = np.array(jax.devices())[order][: math.prod(sizes)].reshape(sizes)
    return Mesh(devices, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


@both_vma
@pytest.mark.usefixtures("_few_blocks")
@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 1, 2), (2, 2, 2)], ids=str)
def test_addresses_begin_with_ones_own(sizes: tuple[int, ...], check_vma: bool) -> None:
    mesh = mesh_of(sizes)
    for axis, (name, size) in enumerate(mesh.shape.items()):
        if size == 1:
            continue
        sharded = jax.shard_map(
            lambda name=name: symmetric_workspace.workspace_pointers(name),
            mesh=mesh,
            in_specs=(),
            out_specs=P(mesh.axis_names),
            check_vma=check_vma,
        )
        compiled = overlap_jit(sharded, peer_kernels=True)
        words = np.asarray(compiled()).reshape(*sizes, 2 * size + 1)
        allocated: Any = symmetric_workspace._allocated[tuple(mesh.devices.flat), sizes, axis]
        spaces = allocated.arrays
        for place in np.ndindex(sizes):
            along = np.roll(np.moveaxis(mesh.devices, axis, -1), -place[axis], axis=-1)
            around = along[(*place[:axis], *place[axis + 1 :])]
            pointers = [spaces[device].unsafe_buffer_pointer() for device in around]
            assert list(words[place][:-1]) == list(np.array(pointers, np.uint64).view(np.int32))
            assert words[place][-1] == place[axis]
            assert all(space.devices() == {device} for device, space in spaces.items())


@pytest.mark.parametrize("jit", [jax.jit, overlap_jit, partial(overlap_jit, peer_kernels=False)])
def test_no_program_has_addresses_without_the_options_they_need(
    jit: Callable,
) -> None:
    specs: dict[str, Any] = {"in_specs": (), "out_specs": P(("a",)), "check_vma": False}
    mesh = mesh_of((4,))
    fun = partial(symmetric_workspace.workspace_pointers, "a")
    sharded = jax.shard_map(fun, mesh=mesh, **specs)
    with pytest.raises(ValueError, match=r"^a kernel that addresses peers: .* peer_kernels=True\)"):
        jit(sharded)()


def identities(devices: np.ndarray) -> np.ndarray:
    return np.array([device.id for device in devices.flat], np.int32).reshape(devices.shape)


@jax.jit
def constant(x: jax.Array) -> jax.Array:
    """Adds a constant of a mesh of 4 devices; traced once for all such meshes."""
    return x + device_constant(identities, (4,), np.int32)


def sharded(mesh: Mesh | AbstractMesh | None, check_vma: bool = True) -> Callable:
    return jax.shard_map(
        constant, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=check_vma
    )


ZEROS = np.zeros(16, np.int32)


@both_vma
def test_a_constant_is_of_the_mesh_that_it_is_lowered_for(check_vma: bool) -> None:
    for seed in range(3):
        mesh = mesh_of((4,), seed)
        rows = np.asarray(jax.jit(sharded(mesh, check_vma))(ZEROS)).reshape(4, 4)
        assert [list(row) for row in rows] == [list(identities(mesh.devices))] * 4


@both_vma
def test_one_function_under_several_meshes(check_vma: bool) -> None:
    """The meshes have one shape, so JAX traces the function once."""
    traced = []

    def once(x: jax.Array) -> jax.Array:
        traced.append(x)
        return sharded(None, check_vma)(x)

    jitted = jax.jit(once)
    for seed in range(3):
        mesh = mesh_of((4,), seed)
        with jax.set_mesh(mesh):
            value = np.asarray(jitted(ZEROS))
        assert list(value[:4]) == list(identities(mesh.devices))
    assert len(traced) == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_without_devices_there_are_no_addresses(platform: str) -> None:
    mesh = AbstractMesh((4,), ("a",), axis_types=(AxisType.Auto,))
    traced = jax.jit(sharded(mesh)).trace(jax.ShapeDtypeStruct((16,), np.int32))
    with pytest.raises(ValueError, match=r"^a program for AbstractMesh.* without devices: .*;"):
        traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("seed", range(2))
def test_the_devices_of_explicit_axes_are_those_of_the_arguments(seed: int) -> None:
    """Such a program has its mesh from the types of its arguments, without devices."""
    devices = mesh_of((4,), seed).devices
    mesh = Mesh(devices, ("a",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(ZEROS, NamedSharding(mesh, P("a")))

    def fun(x: jax.Array) -> jax.Array:
        return sharded(jax.typeof(x).sharding.mesh)(x)

    overlapped = overlap_jit(fun, peer_kernels=True)
    for run in (overlapped, overlapped.lower(x).compile(), overlapped):
        rows = np.asarray(run(x)).reshape(4, 4)
        assert [list(row) for row in rows] == [list(identities(devices))] * 4


def test_an_exported_program_has_no_addresses() -> None:
    with pytest.raises(
        ValueError, match=r"^an exported program: addresses .* without peer_kernels=True"
    ):
        jax.export.export(jax.jit(sharded(mesh_of((4,)))))(ZEROS)


def test_outside_a_mesh_there_are_no_addresses() -> None:
    with pytest.raises(ValueError, match=r"^a program outside a mesh: .* jax\.set_mesh"):
        jax.jit(lambda: device_constant(identities, (4,), np.int32))()
