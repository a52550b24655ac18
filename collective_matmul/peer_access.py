"""Whether peers, the GPUs of one process, can address each other's memory.

Copy engines and kernels need that. Without it, the permutes of a ring go through NCCL; see
`collective_matmul.transport`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax


@dataclass(frozen=True)
class Disallowed:
    """A program that may not have kernels which address peers' memory, and the reason."""

    reason: str


#: The program being traced has no kernels that address peers' memory. From it `overlap_jit` decides
#: whether the program is traced again with them.
UNDECIDED: Final = "auto"

#: Whether the program being traced is compiled so that its kernels may address peers' memory: True,
#: False, `UNDECIDED`, or a `Disallowed`.
peer_kernels_allowed = jax.make_user_context(False)


def peer_kernels_undecided() -> bool:
    """Whether the program being traced is the one from which `overlap_jit` decides."""
    return peer_kernels_allowed.value == UNDECIDED


def peer_kernels_disallowed_reason() -> str | None:
    """Why kernels may not address peers' memory in the program being traced, or None.

    Such a kernel occupies every multiprocessor while it waits for peers. An NCCL collective that
    XLA runs at the same time could occupy the multiprocessors that a peer's kernel needs, and wait
    for this one: a deadlock.
    """
    value = peer_kernels_allowed.value
    if value is True:
        return None
    if isinstance(value, Disallowed):
        reason = f"overlap_jit does not allow kernels to address peers' memory: {value.reason}"
    elif value == UNDECIDED:
        reason = "overlap_jit has not allowed this program kernels that address peers' memory"
    else:
        reason = (
            "collectives at the same time, as this program is compiled, allow no kernel to address"
            " peers' memory"
        )
    return f"{reason}; compile with collective_matmul.overlap_jit(..., peer_kernels=True)"


@functools.cache
def no_peer_access_reason() -> str | None:
    """The pair of this process's GPUs that cannot address each other's memory, as a reason.

    Returns None if every GPU can address every other, or if there is no NVIDIA GPU. Initializes
    JAX's backend.
    """
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    driver = cuda_driver()
    # JAX and CUDA count the same devices: those that CUDA_VISIBLE_DEVICES leaves visible.
    numbers = [device.local_hardware_id for device in jax.local_devices()]
    pair = driver and pair_without_access(driver, numbers)
    return f"GPU {pair[0]} cannot address the memory of GPU {pair[1]}" if pair else None


def pair_without_access(driver: Any, numbers: Sequence[int]) -> tuple[int, int] | None:
    """The first two GPUs where one cannot address the memory of the other, or None.

    Args:
      driver: NVIDIA's driver library, initialized.
      numbers: CUDA device ordinals.
    """
    for one, other in itertools.permutations(numbers, 2):
        can_access = ctypes.c_int()
        devices = _device(driver, one), _device(driver, other)
        _check(driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), *devices))
        if not can_access.value:
            return one, other
    return None


def cuda_driver() -> Any | None:
    """NVIDIA's driver library, initialized; or None, as on GPUs of another vendor."""
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
