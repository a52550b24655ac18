"""Whether peers, GPUs of one process, can address each other's memory, as copies and kernels do.

Where a ring cannot be copies between peers, permutes go through NCCL. That works everywhere, and
hides nothing, since NCCL's kernels wait for the multiprocessors that the matmul holds.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

#: Whether the program that is traced will be compiled by ``overlap_jit(..., peer_kernels=True)``.
peer_kernels_allowed = jax.make_user_context(False)


def peer_kernels_disallowed_reason() -> str | None:
    """Why no kernel may address peers' memory in the program that is traced, or None.

    Such a kernel holds every multiprocessor while it waits for peers: a collective of NCCL that XLA
    runs at the same time may hold those that a peer's kernel waits for, and wait for this one.
    """
    if peer_kernels_allowed.value:
        return None
    return (
        "collectives at the same time, as this program is compiled, allow no kernel to address"
        " peers' memory; compile with collective_matmul.overlap_jit(..., peer_kernels=True)"
    )


def no_peer_copies_reason(axis_name: str) -> str | None:
    """Why a ring over a mesh axis cannot copy between peers, or None. Called while tracing."""
    if _joins_processes(axis_name):
        return (
            f"axis {axis_name!r} joins devices of several processes, and copies between GPUs need"
            " all of them in one"
        )
    return no_peer_access_reason()


def _joins_processes(axis_name: str) -> bool:
    """Whether devices along a mesh axis belong to different processes, as far as can be told.

    A function that is traced knows its mesh by shape alone. One of all devices is taken to have
    them in the order of `jax.make_mesh`; of any other, nothing is known. A mesh in another order
    costs time, not correctness: XLA chooses the transport of every permute by its real devices.
    """
    if jax.process_count() == 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    devices = sorted(jax.devices(), key=lambda device: device.id)
    if mesh.size != len(devices):
        return True
    processes = np.array([device.process_index for device in devices]).reshape(mesh.axis_sizes)
    along_axis = np.moveaxis(processes, mesh.axis_names.index(axis_name), 0)
    return bool((along_axis != along_axis[0]).any())


@functools.cache
def no_peer_access_reason() -> str | None:
    """Which of this process's GPUs cannot address which, as a reason; None if each can each other.

    None too where there is no NVIDIA GPU. Starts JAX's backend.
    """
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    driver = _cuda_driver()
    # What CUDA_VISIBLE_DEVICES hides has no number, here as in JAX.
    numbers = [device.local_hardware_id for device in jax.local_devices()]
    pair = driver and pair_without_access(driver, numbers)
    return f"GPU {pair[0]} cannot address the memory of GPU {pair[1]}" if pair else None


def pair_without_access(driver: Any, numbers: Sequence[int]) -> tuple[int, int] | None:
    """The first two GPUs of which one cannot address the other's memory, or None.

    Args:
      driver: NVIDIA's driver library, initialised.
      numbers: CUDA's numbers of the GPUs.
    """
    for one, other in itertools.permutations(numbers, 2):
        can_access = ctypes.c_int()
        devices = _device(driver, one), _device(driver, other)
        _check(driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), *devices))
        if not can_access.value:
            return one, other
    return None


def _cuda_driver() -> Any | None:
    """NVIDIA's driver library, initialised; None where there is none, as with GPUs of others."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    _check(driver.cuInit(0))
    return driver


def _device(driver: Any, number: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), number))
    return device


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVIDIA's driver answered with error {status}, a CUresult of cuda.h")
