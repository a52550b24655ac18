"""Whether programs are traced for GPUs that the kernels run on."""

from __future__ import annotations

import jax

#: Compute capability of H100, H200 and H20.
_HOPPER = "9.0"


def hopper_multiprocessors() -> int | None:
    """Multiprocessors of the default backend's GPUs, if those are Hopper's; else None."""
    device = jax.devices()[0]
    if device.platform != "gpu" or getattr(device, "compute_capability", None) != _HOPPER:
        return None
    return device.core_count
