"""The environment of a measurement: hardware, its power and clocks, and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

_GPU_FIELDS = (
    *("name", "driver_version", "power.draw", "power.limit"),
    *("clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu"),
)
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch")


def describe(command: str, devices: Sequence[str] | None = None) -> dict[str, Any]:
    """The machine, the versions, and the command that was given.

    Args:
      command: the command line.
      devices: their kinds; default: all that JAX finds, for which it takes their memory.
    """
    return {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "devices": [d.device_kind for d in jax.devices()] if devices is None else list(devices),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("XLA_", "NCCL_"))
        },
        "gpus": gpu_state(),
    }


def device_kinds(platform: str, devices: int) -> list[str]:
    """The kinds of this many devices, or of all devices for 0, found without JAX."""
    names = [gpu["name"] for gpu in gpu_state()] if platform == "gpu" else ["cpu"] * (devices or 1)
    return (names or ["unknown GPU"])[: devices or None]


def gpu_state() -> list[dict[str, str]]:
    """Power, clocks and temperature of every GPU now; nothing where nvidia-smi does not run."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in output.stdout.splitlines())
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
