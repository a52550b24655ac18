"""The mesh of devices."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from models.config import LlamaConfig
from train.config import MeshConfig

AXES = ("data", "tensor")


def mesh_sizes(
    config: MeshConfig, model: LlamaConfig, devices: int, local_devices: int | None = None
) -> tuple[int, int]:
    """Sizes (data, tensor), with every 0 filled in for `devices` devices.

    A tensor axis of 0 stays within a process, of `local_devices` devices; default: all.

    Raises:
      ValueError: if a size is negative, or the mesh needs more devices than there are.
    """
    for name, size in (("mesh.data", config.data), ("mesh.tensor", config.tensor)):
        if size < 0:
            raise ValueError(f"{name}={size}: expected a number of devices, or 0 for what fits")
    remaining = max(devices // max(config.data, 1), 1)
    remaining = math.gcd(remaining, local_devices or remaining)
    tensor = config.tensor or _largest_tensor_axis(model, remaining)
    data = config.data or max(devices // tensor, 1)
    if data * tensor > devices:
        raise ValueError(
            f"mesh.data={data} × mesh.tensor={tensor} needs {data * tensor} devices and there are"
            f" {devices}; make one smaller, or 0 to take what fits"
        )
    return data, tensor


def _largest_tensor_axis(model: LlamaConfig, devices: int) -> int:
    """The largest divisor of `devices` that the model can be sharded over."""
    sizes = range(1, devices + 1)
    return max(n for n in sizes if devices % n == 0 and model.fits_tensor_axis(n))


def make_mesh(data: int, tensor: int) -> Mesh:
    """A mesh over the first data × tensor devices. Neighbours share a tensor axis.

    The devices of a process are neighbours.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return jax.make_mesh(
        (data, tensor),
        AXES,
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[: data * tensor],
    )


def make_abstract_mesh(
    data: int, tensor: int, device: AbstractDevice | None = None
) -> AbstractMesh:
    """The same mesh without devices, for tracing; `device` is the kind to trace for."""
    types = (AxisType.Auto, AxisType.Auto)
    return AbstractMesh((data, tensor), AXES, axis_types=types, abstract_device=device)
