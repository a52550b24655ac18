"""The device that is traced for, and the rates of the GPUs that costs are predicted for.

The rates are those of Hopper GPUs joined by NVLink and NVSwitch, measured inside compiled stacks of
bfloat16 layers on two and on four H200. There the chip is limited by its power: whatever lets the
tensor cores rest lets the next matmul run faster. A pass over memory, or a collective, therefore
adds less to a stack than it takes alone, and a full wave of tiles runs faster than long matmuls do
on average. With few rows the host limits the program, since it launches every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Rates:
    """What a kind of GPU does in a second, and what it spends around that.

    Attributes:
      multiprocessors: SMs of one GPU.
      tiles: (rows, columns, share of the peak rate) of the tiles that matmuls are computed in.
      peak_flops: of one full wave of tiles in half precision, per second.
      sustained_flops: of long matmuls in half precision, per second.
      operand_bytes: read and written by a matmul, per second.
      kernel_seconds: to start and end one kernel.
      unaligned_slowdown: of matmuls whose rows the copy engine cannot load.
      link_bytes: sent by one GPU in one direction, per second, by copies and collectives alike.
      collective_seconds: to start and end one collective.
      copy_seconds: to start and end one copy between peers.
      pass_bytes: of a pass over memory inside a program, per second.
      host_seconds: of the host for one op, however it is executed.
      host_seconds_per_permute: on top for each permute, at which the threads that drive the devices
        meet.
      host_seconds_per_operand: on top in each step of a ring for each x and w but the first.
    """

    multiprocessors: int
    tiles: tuple[tuple[int, int, float], ...]
    peak_flops: float
    sustained_flops: float
    operand_bytes: float
    kernel_seconds: float
    unaligned_slowdown: float
    link_bytes: float
    collective_seconds: float
    copy_seconds: float
    pass_bytes: float
    host_seconds: float
    host_seconds_per_permute: float
    host_seconds_per_operand: float


HOPPER = Rates(
    multiprocessors=132,
    tiles=((128, 256, 1.0), (128, 128, 0.75), (64, 128, 0.5)),
    peak_flops=8.4e14,
    sustained_flops=6.2e14,
    operand_bytes=4.0e12,
    kernel_seconds=4e-6,
    unaligned_slowdown=2.0,
    link_bytes=3.76e11,
    collective_seconds=28e-6,
    copy_seconds=10e-6,
    pass_bytes=6.5e12,
    host_seconds=40e-6,
    host_seconds_per_permute=50e-6,
    host_seconds_per_operand=12e-6,
)

#: The kinds of device, as JAX names them, that the rates are true of.
_KNOWN_KINDS = frozenset({"NVIDIA H200", "NVIDIA H100 80GB HBM3"})


def has_known_rates() -> bool:
    """Whether `HOPPER` describes the device that is traced for."""
    return traced_device().device_kind in _KNOWN_KINDS


def traced_device() -> jax.sharding.AbstractDevice:
    """The kind of device that is traced for: the mesh's if it says so, else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    first = jax.devices()[0]
    return jax.sharding.AbstractDevice(first.device_kind, num_cores=None, platform=first.platform)
