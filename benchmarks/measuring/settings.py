"""Settings of every benchmark on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from benchmarks.comparison.communication import AXIS
from models.simulated_devices import are_devices_simulated

#: As many as the node has that most reports are of; one would have nothing to communicate with.
_SIMULATED = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every benchmark."""

    platform: Literal["gpu", "cpu"] = "gpu"
    """cpu simulates the devices. It shows that a benchmark runs; its times mean nothing."""
    devices: int = 0
    """Devices on the axis; 0 takes all there are, and simulates 4 where no number was given."""
    output: Path | None = None
    """Folder for the report; default: ./DATE-BENCHMARK."""
    groups: int = 7
    """Timed groups; within each all candidates take turns."""
    group_seconds: float = 0.05
    """How long each candidate runs in each group."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype of all arrays."""
    limit_seconds: float = math.inf
    """No further case begins after this many seconds."""

    @property
    def array_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


def check(settings: Settings) -> None:
    """Raises ValueError for numbers that nothing can be measured with."""
    counts = ("groups", "compile_cases", "compile_threads")
    check_least(settings, 1, *(name for name in counts if hasattr(settings, name)))
    if settings.devices < 0:
        raise ValueError(f"devices={settings.devices}: expected a number of devices, or 0 for all")
    check_positive(settings, "group_seconds", "limit_seconds")


def check_least(settings: object, least: int, *names: str) -> None:
    """Raises ValueError for the first setting named that is below `least`."""
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(f"{name}={getattr(settings, name)}: expected at least {least}")


def check_positive(settings: object, *names: str) -> None:
    """Raises ValueError for the first setting named that is not above 0."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}={getattr(settings, name)}: expected more than 0")


def choose_platform(settings: Settings) -> None:
    """Tells JAX which devices to use. Must be called before JAX looks for devices."""
    if settings.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        wanted = settings.devices or (0 if are_devices_simulated() else _SIMULATED)
        if wanted and jax.config.values["jax_num_cpu_devices"] < wanted:
            jax.config.update("jax_num_cpu_devices", wanted)


def make_mesh(settings: Settings, others: Mapping[str, int] | None = None) -> Mesh:
    """A mesh over the first devices: the benchmarks' axis, and before it others of several devices.

    Args:
      settings: how many devices there are.
      others: the sizes of other axes, by name. Those of 1 are left out.

    Raises:
      ValueError: if there are fewer, or they are not of the platform asked for.
    """
    found = jax.default_backend()
    if found != settings.platform:
        raise ValueError(
            f"platform={settings.platform!r}: JAX finds {found} devices;"
            " give --platform cpu to simulate devices"
        )
    available = jax.devices()
    count = settings.devices or len(available)
    if count > len(available):
        raise ValueError(f"devices={count}: there are {len(available)}; ask for fewer")
    sizes = {name: size for name, size in (others or {}).items() if size != 1}
    for name, size in sizes.items():
        if size < 1 or count % size:
            raise ValueError(f"{name}={size}: expected a divisor of the {count} devices")
    sizes[AXIS] = count // math.prod(sizes.values())
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=available[:count])


def check_names(argument: str, values: Sequence[str], expected: Sequence[str]) -> None:
    """Raises ValueError for the first value that is not among those expected."""
    for value in values:
        if value not in expected:
            raise ValueError(f"{argument}: {value!r} is unknown; expected {', '.join(expected)}")
