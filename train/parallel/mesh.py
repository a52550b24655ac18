"""The mesh of devices: replicas × shards of weights × parts of sequences × tensor parallelism."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from models.config import LlamaConfig
from train.config.config import Config, MeshSizes
from train.config.experts import expert_axes, expert_devices, on_tensor_axis

#: All axes that a mesh may have, from the outermost to the innermost.
AXES = ("data", "fsdp", "context", "tensor")
#: The axes whose devices have sequences of their own.
BATCH_AXES = ("data", "fsdp")
#: The axes over which ZeRO shards weights.
_SHARD_AXES = ("fsdp", "context")
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
    for name in MeshSizes._fields:
        if not 0 <= getattr(mesh, name) <= _MOST_DEVICES:
            raise ValueError(
                f"mesh.{name}={getattr(mesh, name)}: expected a number of devices, or 0 for what"
                f" fits; at most {_MOST_DEVICES}"
            )
    context = max(mesh.context, 1)
    devices_of_all, devices = devices, devices // context
    remaining = max(devices // (max(mesh.data, 1) * max(mesh.fsdp, 1)), 1)
    remaining = math.gcd(remaining, local_devices or remaining)
    tensor = mesh.tensor or _largest_tensor_axis(on_tensor_axis(config), remaining)
    fsdp = mesh.fsdp or 1
    if not mesh.fsdp and (config.zero or "fsdp" in expert_axes(config)):
        fsdp = max(devices // (tensor * max(mesh.data, 1)), 1)
        fsdp = _largest_expert_axis(config, tensor, fsdp)
    sizes = MeshSizes(mesh.data or max(devices // (tensor * fsdp), 1), fsdp, tensor, context)
    if sizes.devices > devices_of_all:
        raise ValueError(
            f"{sizes.flags} needs {sizes.devices} devices and there are {devices_of_all}; make one"
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
    """A mesh over the first devices. Neighbours share a tensor axis, and then a sequence.

    The devices of a process are neighbours.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    axes = sizes.by_axis
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=devices[: sizes.devices],
    )


def make_abstract_mesh(sizes: MeshSizes, device: AbstractDevice | None = None) -> AbstractMesh:
    """Makes the mesh without devices, for tracing; `device` is the kind to trace for."""
    axes = sizes.by_axis
    types = (AxisType.Auto,) * len(axes)
    sizes_and_names = tuple(axes.values()), tuple(axes)
    return AbstractMesh(*sizes_and_names, axis_types=types, abstract_device=device)


def all_axes() -> tuple[str, ...]:
    """The axes of the mesh that is in use, as inside `jax.shard_map`."""
    present = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in AXES if axis in present)


def token_axes() -> tuple[str, ...]:
    """The axes of that mesh whose devices have tokens of their own: losses and gradients are summed
    over them."""
    return tuple(axis for axis in all_axes() if axis != "tensor")


def shard_axes() -> tuple[str, ...]:
    """The axes of that mesh over which ZeRO shards weights."""
    return tuple(axis for axis in all_axes() if axis in _SHARD_AXES)


def shard_axes_of(sizes: MeshSizes) -> tuple[str, ...]:
    """Returns the shard axes of a mesh of these sizes."""
    return tuple(axis for axis in sizes.by_axis if axis in _SHARD_AXES)
