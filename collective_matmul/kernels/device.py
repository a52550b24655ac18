"""Whether programs are traced for GPUs that the kernels run on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

# Compute capability of the H100, H200 and H20.
_HOPPER = "9.0"


class Target(NamedTuple):
    """What a kernel is built for.

    Attributes:
      multiprocessors: of each GPU.
      interpret: runs the kernel on the CPU, as for `pl.kernel`.
    """

    multiprocessors: int
    interpret: Any = False


def target() -> Target | None:
    """The GPUs of the default backend, if those are Hopper's."""
    device = jax.devices()[0]
    if device.platform != "gpu" or getattr(device, "compute_capability", None) != _HOPPER:
        return None
    return Target(device.core_count)
