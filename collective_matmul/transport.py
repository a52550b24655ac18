"""Who moves the bytes between the devices along mesh axes, in the program being traced.

GPUs of one process copy between each other on their copy engines. Those of several processes of a
node have NCCL, whose kernels take multiprocessors from the matmul: fewer of them, and sooner, where
XLA gives NCCL symmetric buffers. Between nodes NCCL has the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import jax
import numpy as np

from collective_matmul.peer_access import no_peer_access_reason

Transport = Literal["peer_copies", "nccl_symmetric", "nccl", "network"]

#: All transports, the fastest first.
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)

_TEXTS: Final[dict[Transport, str]] = {
    "peer_copies": "",
    "nccl_symmetric": " through NCCL with symmetric buffers",
    "nccl": " through NCCL",
    "network": " through NCCL between nodes",
}

#: Whether the program being traced is compiled so that NCCL has symmetric buffers.
symmetric_buffers = jax.make_user_context(False)


def transport_over(*axes: str | tuple[str, ...]) -> Transport:
    """Who moves bytes along mesh axes: the slowest of all, for each its own.

    While tracing, only the shape of the mesh is known. A mesh of all devices is assumed to have the
    order of `jax.make_mesh`; along an axis of a smaller one every device is assumed to belong to
    another process of one node. A wrong guess costs time, not correctness: XLA chooses for every
    collective by the real devices.

    Args:
      axes: names of mesh axes, or tuples of names. Call it while tracing, inside `jax.shard_map`.
    """
    names = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis)]
    found: list[Transport] = ["peer_copies", *map(_along, names)]
    return max(found, key=TRANSPORTS.index)


def _along(axis_name: str) -> Transport:
    if jax.process_count() == 1:
        return "nccl" if no_peer_access_reason() else "peer_copies"
    mesh = jax.sharding.get_abstract_mesh()
    devices = sorted(jax.devices(), key=lambda device: device.id)
    if mesh.size != len(devices):
        return _between_processes()
    grid = np.array(devices, dtype=object).reshape(mesh.axis_sizes)
    groups = np.moveaxis(grid, mesh.axis_names.index(axis_name), -1)
    groups = groups.reshape(-1, groups.shape[-1])
    if any(len(set(map(node_of, group))) > 1 for group in groups):
        return "network"
    if any(len({device.process_index for device in group}) > 1 for group in groups):
        return _between_processes()
    return "nccl" if no_peer_access_reason() else "peer_copies"


def transport_between(devices: Sequence[Any]) -> Transport:
    """Who moves bytes between devices in programs that `overlap_jit` compiles."""
    if len(set(map(node_of, devices))) > 1:
        return "network"
    if len({device.process_index for device in devices}) > 1:
        return "nccl_symmetric" if shares_node(jax.devices()) else "nccl"
    return "nccl" if no_peer_access_reason() else "peer_copies"


def _between_processes() -> Transport:
    return "nccl_symmetric" if symmetric_buffers.value else "nccl"


def node_of(device: Any) -> Any:
    """The node of a device, among nodes that NVLink does not join.

    JAX numbers them on GPUs. Simulated devices are all on this one.
    """
    return getattr(device, "slice_index", 0)


def shares_node(devices: Sequence[Any]) -> bool:
    """Whether two devices of different processes are on one node."""
    pairs = {(node_of(device), device.process_index) for device in devices}
    return len(pairs) > len({node for node, _ in pairs})


def described_transport(transport: Transport) -> str:
    """Text to follow the name of an axis, such as " through NCCL"; "" for copies between peers."""
    return _TEXTS[transport]


def transport_fields(transport: Transport) -> dict[str, str]:
    """The transport as a field of a table's entry; none for copies between peers."""
    return {} if transport == "peer_copies" else {"transport": transport}


def transport_of_fields(fields: Mapping[str, Any]) -> Transport:
    """The transport that `transport_fields` wrote.

    Raises:
      ValueError: for another value.
    """
    transport = fields.get("transport", "peer_copies")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r}: expected one of {', '.join(TRANSPORTS)}")
    return transport
