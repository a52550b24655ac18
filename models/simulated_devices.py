"""Simulated devices on a machine without GPUs."""

from __future__ import annotations

import jax

#: Each has threads of its own.
_MOST = 1024


def simulate_devices(argument: str, count: int) -> None:
    """Simulates this number of devices. Call it before JAX initializes its backend.

    Raises:
      ValueError: fewer than one, or more than a machine can simulate; names `argument`.
    """
    if not 1 <= count <= _MOST:
        raise ValueError(f"{argument}={count}: expected at least 1 and at most {_MOST}")
    if jax.config.values["jax_num_cpu_devices"] != count:
        jax.config.update("jax_num_cpu_devices", count)
