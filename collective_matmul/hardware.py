"""The device of a traced program, and the rates of known GPUs for predictions.

The rates of `HOPPER` are those of GPUs joined by NVLink and NVSwitch, measured inside compiled
stacks of bfloat16 layers on two and on four H200. There the chip is limited by its power: whatever
lets the tensor cores rest lets the next matmul run faster. A pass over memory, or a collective,
therefore adds less to a stack than it takes alone, and a full wave of tiles runs faster than long
matmuls do on average. With few rows the host limits the program, since it launches every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax


@dataclass(frozen=True)
class Rates:
    """Rates and overheads of a kind of GPU. Rates are per second.

    Attributes:
      basis: source of predictions from these rates, in words.
      multiplies_in_place: whether the Hopper kernels run that multiply the chunks of a ring.
      multiprocessors: SMs of one GPU.
      tiles: (rows, columns, share of the peak rate) of the tiles that matmuls are computed in.
      peak_flops: rate of one full wave of tiles in half precision.
      sustained_flops: rate of long matmuls in half precision.
      operand_bytes: rate at which a matmul reads and writes memory.
      kernel_seconds: time to start and end one kernel.
      unaligned_slowdown: factor for matmuls whose rows the TMA engine cannot load.
      link_bytes: rate at which one GPU sends in one direction, by copies or collectives.
      network_bytes: rate at which one GPU sends to other nodes.
      collective_seconds: time to start and end one collective.
      copy_seconds: time to start and end one copy between peers.
      pass_bytes: rate of a pass over memory inside a program.
      host_seconds: host time for one op with any backend.
    """

    basis: str
    multiplies_in_place: bool
    multiprocessors: int
    tiles: tuple[tuple[int, int, float], ...]
    peak_flops: float
    sustained_flops: float
    operand_bytes: float
    kernel_seconds: float
    unaligned_slowdown: float
    link_bytes: float
    network_bytes: float
    collective_seconds: float
    copy_seconds: float
    pass_bytes: float
    host_seconds: float


HOPPER = Rates(
    basis="cost model",
    multiplies_in_place=True,
    multiprocessors=132,
    tiles=((128, 256, 1.0), (128, 128, 0.75), (64, 128, 0.5)),
    peak_flops=8.4e14,
    sustained_flops=6.2e14,
    operand_bytes=4.0e12,
    kernel_seconds=4e-6,
    unaligned_slowdown=2.0,
    link_bytes=3.76e11,
    # A port of 400 Gbit/s for each GPU, as in a DGX H100. Nothing was measured between nodes.
    network_bytes=5.0e10,
    collective_seconds=28e-6,
    copy_seconds=10e-6,
    pass_bytes=6.5e12,
    host_seconds=40e-6,
)

#: The A100 of 80 GB with NVSwitch: its data sheet, and the shares that Hopper GPUs reach of theirs.
#: An A100 is not limited by its power as they are. Nothing was measured on one; the overheads that
#: are not given are those of Hopper GPUs.
AMPERE = replace(
    HOPPER,
    basis="estimate from the data sheet",
    multiplies_in_place=False,
    multiprocessors=108,
    tiles=((128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.6)),
    peak_flops=2.7e14,
    sustained_flops=2.5e14,
    operand_bytes=1.7e12,
    kernel_seconds=5e-6,
    link_bytes=2.5e11,
    network_bytes=2.5e10,
    pass_bytes=2.0e12,
)

#: Rates by JAX's names of the kinds of device.
_RATES = {
    "NVIDIA H200": HOPPER,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA A100-SXM4-80GB": AMPERE,
}


def rates() -> Rates | None:
    """The rates of the device of the traced program; None if they are not known."""
    return _RATES.get(traced_device().device_kind)


def assumed_rates() -> Rates:
    """The rates of the device of the traced program; those of Hopper GPUs if they are not known."""
    return rates() or HOPPER


def known_kinds(part: str) -> list[str]:
    """JAX's names of kinds of device whose rates are known and whose names have this part."""
    return [kind for kind in _RATES if part in kind and part != kind]


def traced_device() -> jax.sharding.AbstractDevice:
    """The kind of device of the traced program: that of its mesh if known, else the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    first = jax.devices()[0]
    return jax.sharding.AbstractDevice(first.device_kind, num_cores=None, platform=first.platform)


def how_to_simulate(devices: int) -> str:
    """How to simulate devices on a CPU, as part of an error's text."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    return f"on a CPU, XLA_FLAGS={flag} simulates {devices}"
