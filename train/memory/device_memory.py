"""The memory of a GPU that XLA may allocate, and whether a run fits into it.

JAX takes a fraction of a GPU's memory when it starts, three quarters by default, and arrays never
get more. The rest is for what others allocate: CUDA, NCCL's buffers, cuBLAS.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from jax.sharding import AbstractDevice

from train.log.metrics import Device

#: The fraction that the trainer asks for. 6 GB of 80 remain for NCCL and CUDA, 11 GB of 141.
FRACTION = 0.92
#: The variables that say the fraction; JAX refuses both at once.
VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
#: The share of these bytes that stays free, since a prediction may be as much too low: the dry run
#: of all 32 layers of Llama 3 8B in 8 bits predicts 93.8 % of what was measured
#: (benchmarks/reports/2026-11-25-train-8b-2-h200.md), and both it and the plan at least 95.4 % of
#: what was compiled (2026-11-27-compiled-memory-long-2-h200.md).
MARGIN = 0.062


def set_memory_fraction() -> None:
    """Sets the fraction for JAX, unless the user has. JAX reads it when its backend starts."""
    if not any(os.environ.get(name) for name in VARIABLES):
        os.environ[VARIABLES[0]] = str(FRACTION)


def memory_fraction() -> float:
    """The fraction of a GPU's memory that JAX takes here.

    Raises:
      ValueError: if the environment says no number.
    """
    for name in VARIABLES:
        if value := os.environ.get(name):
            try:
                return float(value)
            except ValueError:
                raise ValueError(f"{name}={value!r}: expected a number such as 0.9") from None
    return FRACTION


def memory_limit(device: Device) -> tuple[int | None, str]:
    """The bytes that JAX may use of a device, or None if unknown; and whose they are, in words."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit, f"that JAX may use of {device.device_kind}"


def describe_memory(device: Device) -> list[str]:
    """How much memory JAX takes of a GPU, as lines to print; none if that is not known."""
    limit, _ = memory_limit(device)
    if limit is None:
        return []
    variable = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
    return [
        f"memory: JAX may use {limit:,} bytes of each device, {memory_fraction():.0%} of it"
        f" ({variable})"
    ]


def usable(limit: int) -> int:
    """The bytes that a prediction may have, so that the run fits with the margin."""
    return int(limit * (1 - MARGIN))


def fit(total: int, limit: int) -> str:
    """Whether so many bytes fit into those that XLA may allocate, in short."""
    if total <= usable(limit):
        return "fits"
    return "may not fit" if total <= limit else "does not fit"


def verdict(total: int, limit: int | None, whose: str) -> str:
    """Says whether a run fits into a device.

    Args:
      total: its predicted bytes.
      limit: the bytes that XLA may allocate, or None if that is not known.
      whose: says of which device they are.
    """
    if limit is None:
        return f"how much memory {whose.removeprefix('that ')} is not known"
    sentence = f"{fit(total, limit)} into the {limit:,} bytes {whose}"
    if total > limit:
        return f"{sentence}, by {total - limit:,}"
    sentence += f": {limit - total:,} are left"
    if total <= usable(limit):
        return sentence
    return f"{sentence}, and predictions have been up to {MARGIN:.1%} too low"


class Gpu(NamedTuple):
    """A kind of GPU to predict for.

    Attributes:
      device: what JAX knows of it.
      capacity: its bytes, by its data sheet.
      remark: what its predictions come from; None for measurements.
    """

    device: AbstractDevice
    capacity: int
    remark: str | None = None

    @property
    def memory(self) -> int:
        """The bytes that XLA may allocate."""
        return int(self.capacity * memory_fraction())


GPUS = {
    "H200": Gpu(AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"), 141 * 10**9),
    "H100": Gpu(AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"), 80 * 10**9),
    "A100": Gpu(
        AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"),
        80 * 10**9,
        "times on an A100 are estimated from its data sheet, for xla and rings; none was measured",
    ),
}
