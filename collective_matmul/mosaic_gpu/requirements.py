"""Requirements of kernels that access the memory of peers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from collective_matmul._compat import partly_automatic
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.peers import shared_memory
from collective_matmul.transport import Transport, node_of

#: An array, or its shape and dtype.
Array = jax.Array | jax.ShapeDtypeStruct


def unsupported_reason(devices: int, *arrays: Array) -> str | None:
    """Returns why no kernel can access these arrays on the devices of an axis; None if one can.

    Args:
      devices: the size of the axis.
      *arrays: the arrays that the kernel would read, or their shapes and dtypes.
    """
    if device.target() is None:
        return "these kernels run on Hopper GPUs only"
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}: these kernels need 0.11 or newer"
    if partly_automatic():
        return "these kernels cannot be divided over automatic mesh axes; make all axes manual"
    dtypes = {jnp.dtype(array.dtype).name for array in arrays}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
        return f"dtypes {sorted(dtypes)}: these kernels take bfloat16, or float16, for all"
    if devices == 1:
        return "an axis of size 1: there is nothing to communicate"
    if not all(array.size for array in arrays):
        return "an array without elements: there is nothing to multiply"
    return None


def workspaces_reason(transport: Transport) -> str | None:
    """Returns why devices cannot have symmetric workspaces; None if they can.

    With several processes this is found out once, by all of them together: ask last.

    Args:
      transport: between the devices along the axis, see `collective_matmul.transport`.
    """
    return _node_reason(transport) or _of_several_processes(shared_memory.unshared_reason)


def peer_arrays_reason(transport: Transport) -> str | None:
    """Returns why kernels cannot store to arrays of peers; None if they can. Ask last, likewise."""
    reason = workspaces_reason(transport)
    return reason or _of_several_processes(shared_memory.unshared_pools_reason)


def _node_reason(transport: Transport) -> str | None:
    """Returns that devices along the axis may be on several nodes; None if they are not."""
    if transport == "network":
        return "the axis crosses nodes: these kernels address memory of GPUs on one node"
    mesh, nodes = jax.sharding.get_abstract_mesh(), set(map(node_of, jax.devices()))
    if len(nodes) > 1 and not mesh.empty and mesh.size != jax.device_count():
        return (
            f"a mesh of {mesh.size} of {jax.device_count()} devices on {len(nodes)} nodes: which of"
            " them share a node is known of all devices only, and these kernels need it"
        )
    return None


def _of_several_processes(find_reason: Callable[[], str | None]) -> str | None:
    if jax.process_count() == 1 or not (reason := find_reason()):
        return None
    return (
        f"{jax.process_count()} processes: these kernels address peers' memory, which these"
        f" processes cannot share: {reason}; a single process with all GPUs of a node need not"
    )
