"""The record of a run in its log: the configuration, the versions and the hardware."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

_PACKAGES = (
    "collective-matmul", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy",
    "tokenizers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
#: Variables that change what a run computes or how fast.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XLA_", "JAX_", "NCCL_")


def run_record(configuration: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Describes a run as JSON.

    Args:
      configuration: what the run was asked for, with every default filled in.
      mesh: the devices.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "configuration": dict(configuration),
        "versions": _versions(),
        "hardware": _hardware(mesh),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def _versions() -> dict[str, str]:
    """Versions of Python, of packages that are installed, and the commit of the repository."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _commit():
        versions["commit"] = commit
    return versions


def _commit() -> str | None:
    """The commit of the repository with the trainer; "+" marks changes. None outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40"]
    try:
        result = subprocess.run(
            [*command, "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _hardware(mesh: Mesh) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "processes": jax.process_count(),
        "device_kind": device.device_kind,
        # The versions of CUDA and of its driver, where there are GPUs.
        "platform": f"{device.platform}: {device.client.platform_version}".strip(),
        "memory_bytes_per_device": (device.memory_stats() or {}).get("bytes_limit"),
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
    }
