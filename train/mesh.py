"""The mesh of devices: replicas × shards of weights × tensor parallelism."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from models.config import LlamaConfig
from train.config import Config, MeshSizes
from train.experts import expert_axes, expert_devices, on_tensor_axis

AXES = MeshSizes._fields
#: The axes whose devices have sequences of their own.
BATCH_AXES = ("data", "fsdp")
#: Far more than there are in one place.
_MOST_DEVICES = 2**20


def mesh_sizes(config: Config, devices: int, local_devices: int | None = None) -> MeshSizes:
    """The sizes of the axes, with every 0 filled in for `devices` devices.

    The tensor axis takes as many as divide the model. With ZeRO the fsdp axis takes the rest,
    without it the data axis does. An fsdp axis that divides experts takes as many of these devices
    as it can.

    A tensor axis of 0 stays within a process, of `local_devices` devices; default: all.

    Raises:
      ValueError: if a size is negative or beyond all machines, or the mesh needs more devices than
        there are.
    """
    mesh = config.mesh
    for name in AXES:
        if not 0 <= getattr(mesh, name) <= _MOST_DEVICES:
            raise ValueError(
                f"mesh.{name}={getattr(mesh, name)}: expected a number of devices, or 0 for what"
                f" fits; at most {_MOST_DEVICES}"
            )
    remaining = max(devices // (max(mesh.data, 1) * max(mesh.fsdp, 1)), 1)
    remaining = math.gcd(remaining, local_devices or remaining)
    tensor = mesh.tensor or _largest_tensor_axis(on_tensor_axis(config), remaining)
    fsdp = mesh.fsdp or 1
    if not mesh.fsdp and (config.zero or "fsdp" in expert_axes(config)):
        fsdp = max(devices // (tensor * max(mesh.data, 1)), 1)
        fsdp = _largest_expert_axis(config, tensor, fsdp)
    sizes = MeshSizes(mesh.data or max(devices // (tensor * fsdp), 1), fsdp, tensor)
    if sizes.devices > devices:
        raise ValueError(
            f"{sizes.flags} needs {sizes.devices} devices and there are {devices}; make one"
            " smaller, or 0 to take what fits"
        )
    return sizes


def _largest_tensor_axis(model: LlamaConfig, devices: int) -> int:
    """The largest divisor of `devices` that the model can be sharded over."""
    sizes = range(1, devices + 1)
    return max(n for n in sizes if devices % n == 0 and model.fits_tensor_axis(n))


def _largest_expert_axis(config: Config, tensor: int, devices: int) -> int:
    """The largest divisor of `devices` that an fsdp axis may have which divides the experts; all
    devices if it does not divide any."""
    experts = config.model.num_experts
    if experts is None or "fsdp" not in expert_axes(config):
        return devices

    def divides(n: int) -> bool:
        return experts % expert_devices(config, MeshSizes(1, n, tensor)) == 0

    return max((n for n in range(1, devices + 1) if devices % n == 0 and divides(n)), default=1)


def make_mesh(sizes: MeshSizes) -> Mesh:
    """A mesh over the first devices. Neighbours share a tensor axis.

    The devices of a process are neighbours.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return jax.make_mesh(
        sizes,
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[: sizes.devices],
    )


def make_abstract_mesh(sizes: MeshSizes, device: AbstractDevice | None = None) -> AbstractMesh:
    """The same mesh without devices, for tracing; `device` is the kind to trace for."""
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(sizes, AXES, axis_types=types, abstract_device=device)
