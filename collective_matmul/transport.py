"""The transport of bytes between devices along mesh axes, in the program being traced.

GPUs of one process copy between each other on their copy engines. GPUs of several processes, and
those that cannot address each other's memory, have NCCL, whose kernels wait for multiprocessors
that a matmul occupies. Between nodes NCCL uses the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from collective_matmul.peer_access import no_peer_access_reason

Transport = Literal["peer_copies", "nccl", "network"]

#: All transports, the fastest first.
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)

_TEXTS: Final[dict[Transport, str]] = {
    "peer_copies": "",
    "nccl": " through NCCL",
    "network": " through NCCL between nodes",
}


def transport_over(*axes: str | tuple[str, ...]) -> Transport:
    """The transport along mesh axes: of several axes, the slowest.

    While tracing, only the shape of the mesh is known. A mesh of all devices is assumed to have the
    order of `jax.make_mesh`; the devices of a smaller one are assumed to belong to different
    processes of one node. A wrong guess costs time, not correctness: XLA chooses for every
    collective by the real devices.

    Args:
      *axes: names of mesh axes, or tuples of names. Call it while tracing, inside `jax.shard_map`.
    """
    names = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis)]
    return _slowest(map(_along, names))


def _along(axis_name: str) -> Transport:
    return transport_along(jax.sharding.get_abstract_mesh(), axis_name)


def transport_along(mesh: AbstractMesh | Mesh, axis_name: str) -> Transport:
    """The transport along an axis of a mesh, assumed as by `transport_over`."""
    if jax.process_count() == 1:
        return transport_between(())
    devices = sorted(jax.devices(), key=lambda device: device.id)
    if axis_name not in mesh.axis_names or mesh.size != len(devices):
        return "nccl"
    grid = np.array(devices, dtype=object).reshape(mesh.axis_sizes)
    groups = np.moveaxis(grid, mesh.axis_names.index(axis_name), -1)
    return _slowest(map(transport_between, groups.reshape(-1, groups.shape[-1]).tolist()))


def _slowest(transports: Iterable[Transport]) -> Transport:
    return TRANSPORTS[max(map(TRANSPORTS.index, transports), default=0)]


def node_of(device: Any) -> int:
    """The number of a device's node. JAX numbers those of GPUs; simulated devices are on one."""
    return getattr(device, "slice_index", 0)


def transport_between(devices: Sequence[Any]) -> Transport:
    """The transport between these devices. Without any, between those of this process."""
    if len(set(map(node_of, devices))) > 1:
        return "network"
    several = len({device.process_index for device in devices}) > 1
    return "nccl" if several or no_peer_access_reason() else "peer_copies"


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
