"""Whether programs are traced for GPUs that the kernels run on."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

# Compute capability of the H100, H200 and H20, and how JAX names such GPUs.
_HOPPER = "9.0"
_HOPPER_KIND = re.compile(r"NVIDIA G?H\d")


class Target(NamedTuple):
    """What a kernel is built for.

    Attributes:
      multiprocessors: of each GPU.
      interpret: runs the kernel on the CPU, as for `pl.kernel`.
    """

    multiprocessors: int
    interpret: Any = False


def target() -> Target | None:
    """The GPUs of the mesh, or else of the default backend, if they are Hopper's."""
    device, of_mesh = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is not None and of_mesh.device_kind != device.device_kind:
        # Not of this machine: there is a name alone.
        is_hopper = of_mesh.num_cores and _HOPPER_KIND.match(of_mesh.device_kind)
        return Target(of_mesh.num_cores) if is_hopper else None
    if device.platform != "gpu" or getattr(device, "compute_capability", None) != _HOPPER:
        return None
    return Target(device.core_count)
