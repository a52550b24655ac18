"""The GPU that a program is traced for, if the kernels can run on it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

# Compute capability of the H100, H200 and H20, and how JAX names such GPUs.
_HOPPER = "9.0"
_HOPPER_KIND = re.compile(r"NVIDIA G?H\d")


class Sharing(NamedTuple):
    """How kernels share a GPU with communication that takes multiprocessors.

    A kernel of persistent blocks holds its multiprocessors to its end. Communication that takes
    some waits for it, unless the kernel leaves them.

    Attributes:
      left: multiprocessors that kernels leave.
      by_xla: whether XLA multiplies what it multiplies as fast as a kernel. Its many short blocks
        let communication begin between them.
    """

    left: int = 0
    by_xla: bool = False


#: How kernels that are being traced share the GPU.
sharing = jax.make_user_context(Sharing())


class Target(NamedTuple):
    """The GPU that a kernel is built for.

    Attributes:
      multiprocessors: number of multiprocessors of the GPU.
      interpret: how to interpret the kernel on the CPU, see `pl.kernel`; False for GPUs.
    """

    multiprocessors: int
    interpret: Any = False


def target() -> Target | None:
    """Returns the GPU of the mesh, or else of the default backend; None if that is not Hopper."""
    device, of_mesh = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is not None and of_mesh.device_kind != device.device_kind:
        # GPUs of another machine, as for ahead-of-time compilation: only their name is known.
        is_hopper = of_mesh.num_cores and _HOPPER_KIND.match(of_mesh.device_kind)
        return Target(of_mesh.num_cores) if is_hopper else None
    if device.platform != "gpu" or getattr(device, "compute_capability", None) != _HOPPER:
        return None
    return Target(device.core_count)


def sharing_target() -> Target | None:
    """Returns `target`, without the multiprocessors that `sharing` leaves to communication."""
    found = target()
    left = sharing.value.left
    return found and found._replace(multiprocessors=found.multiprocessors - left)
