"""Simulated devices on a machine without GPUs."""

from __future__ import annotations

import os
import re

import jax

#: Each has threads of its own.
_MOST = 1024
_FLAG = r"--xla_force_host_platform_device_count=(\d+)"


def simulate_devices(argument: str, count: int | None, default: int) -> None:
    """Simulates this number of devices. Call it before JAX initializes its backend.

    Args:
      argument: what asks for it.
      count: the number; None: `default`, unless JAX's configuration or XLA_FLAGS has a number.
      default: the number that is simulated if nobody names one.

    Raises:
      ValueError: fewer than one, or more than a machine can simulate; names `argument`.
    """
    if count is None:
        if are_devices_simulated():
            return
        count = default
    if not 1 <= count <= _MOST:
        raise ValueError(f"{argument}={count}: expected at least 1 and at most {_MOST}")
    if _simulated() != count:
        jax.config.update("jax_num_cpu_devices", count)


def are_devices_simulated() -> bool:
    """Whether JAX's configuration or XLA_FLAGS has a number of simulated devices."""
    return _simulated() is not None


def _simulated() -> int | None:
    """The number of simulated devices in JAX's configuration, or else in XLA_FLAGS."""
    configured = jax.config.values["jax_num_cpu_devices"]  # -1 where it was not given.
    if configured >= 0:
        return configured
    *_, last = [None, *re.findall(_FLAG, os.environ.get("XLA_FLAGS", ""))]
    return None if last is None else int(last)
