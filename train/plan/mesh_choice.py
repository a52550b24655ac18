"""The tensor axis of a run that leaves its size to the trainer, and meshes that would be faster."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import jax

from train.config.checks import check_trained
from train.config.config import Config, MeshConfig, MeshSizes
from train.config.defaults import saved_configuration
from train.memory.device_memory import GPUS, usable
from train.parallel.mesh import mesh_sizes
from train.plan.candidates import check_sharded, meshes, shardings
from train.plan.memory_estimate import predict_memory
from train.plan.step_time import milliseconds, predict, unpredicted_reason

#: How far predicted step times have been off: meshes that are closer are as fast.
_ERROR = 0.05

#: Where a checkpoint's configuration has the mesh of the run.
SAVED_SIZES = "mesh_sizes"


def planned_mesh_sizes(
    config: Config, devices: int, local_devices: int | None, device_kind: str
) -> MeshSizes:
    """The sizes of the axes, with every 0 filled in.

    A tensor axis of 0 takes the size with the shortest predicted step, of those that fit into
    memory; the other axes take the rest, as `mesh_sizes` says. A run that resumes keeps its mesh,
    unless it asks for another number of replicas or shards. Where nothing is predicted, or nothing
    fits, sizes are those of `mesh_sizes`. The result depends on the arguments alone, so that all
    processes choose alike.

    Args:
      config: the configuration.
      devices: number of devices.
      local_devices: number of devices of a process, within which the tensor axis stays; None: all.
      device_kind: JAX's name of the GPU.

    Raises:
      ValueError: see `mesh_sizes` and `check_trained`.
    """
    check_trained(config)
    default = mesh_sizes(config, devices, local_devices)
    if config.mesh.tensor:
        return default
    kept = _sizes_before(config)
    if kept is not None and kept.devices == default.devices and _is_asked_for(kept, config.mesh):
        return kept
    if unpredicted_reason(config, device_kind) is not None:
        return default
    sizes = [size for size in range(1, default.tensor + 1) if default.tensor % size == 0]
    seconds: dict[MeshSizes, float] = {}
    for tensor in sizes:
        mesh = dataclasses.replace(config.mesh, tensor=tensor)
        with suppress(ValueError):
            of_size = mesh_sizes(dataclasses.replace(config, mesh=mesh), devices, local_devices)
            time = _seconds(config, of_size, device_kind)
            if time is not None and of_size.devices == default.devices:
                seconds[of_size] = time
    return min(seconds, key=seconds.__getitem__, default=default)


def describe_unpredicted(config: Config, sizes: MeshSizes, device_kind: str) -> list[str]:
    """Why a run chose its tensor axis without a prediction, as lines to print; none if it was asked
    for, kept or predicted. The arguments are those of `planned_mesh_sizes` and its result."""
    is_predicted = unpredicted_reason(config, device_kind) is None
    if config.mesh.tensor or is_predicted or sizes == _sizes_before(config):
        return []
    return [
        f"tensor={sizes.tensor}: as many devices as divide the model, since no step time is"
        f" predicted for {device_kind}; --mesh.tensor sets another size"
    ]


def describe_mesh_here(config: Config, sizes: MeshSizes, device_kind: str) -> list[str]:
    """The mesh that a run here would have in place of a dry run's, as lines to print; none if both
    are the same, or if it would be refused.

    Args:
      config: the configuration.
      sizes: the mesh of the dry run.
      device_kind: JAX's name of the GPU that it predicts for.
    """
    devices, kind = jax.device_count(), jax.devices()[0].device_kind
    here = sizes
    with suppress(ValueError):
        here = planned_mesh_sizes(config, devices, jax.local_device_count(), kind)
    if here == sizes:
        return []
    is_predicted = unpredicted_reason(config, kind) is None
    why = "which is predicted to be fastest" if is_predicted else "since no step time is predicted"
    return [
        f"this mesh is chosen for {device_kind}; a run on the {devices} {kind} devices here would"
        f" take {here}, {why} there; give --mesh.tensor and the other sizes to fix one"
    ]


def describe_faster_mesh(
    config: Config, sizes: MeshSizes, device_kind: str, attention: str
) -> list[str]:
    """A mesh and a ZeRO level that would be faster, as lines to print; none if no other one is.

    All else stays as it is. Flags that ask for a ZeRO level are kept.

    Args:
      config: the configuration.
      sizes: its mesh.
      device_kind: JAX's name of the GPU.
      attention: the kernel of attention.
    """
    if unpredicted_reason(config, device_kind) is not None:
        return []
    chosen = _seconds(config, sizes, device_kind, attention)
    given = frozenset(name for name in config.given if not name.startswith("mesh."))
    free = dataclasses.replace(config, mesh=MeshConfig(), given=given)
    found: list[tuple[float, MeshSizes, dict[str, Any]]] = []
    for other in meshes(free, sizes.devices):
        for changes in shardings(free, other):
            with suppress(ValueError):
                changed = dataclasses.replace(free, **changes)
                time = _seconds(changed, other, device_kind, attention)
                if time is not None:
                    found.append((time, other, changes))
    if not found:
        return []
    time, other, changes = min(found, key=lambda each: each[0])
    if chosen is not None and time > (1 - _ERROR) * chosen:
        return []
    flags = [f"--mesh.{axis} {size}" for axis, size in other._asdict().items()]
    flags += [
        f"--{name.replace('_', '-')} {value}"
        for name, value in changes.items()
        if value != getattr(config, name)
    ]
    return [
        f"faster: {' '.join(flags)} takes {milliseconds(time)} by the same prediction, and fits;"
        " --plan lists more"
    ]


def _seconds(
    config: Config, sizes: MeshSizes, device_kind: str, attention: str | None = None
) -> float | None:
    """The predicted step time; None if it does not fit into memory.

    Raises:
      ValueError: if the mesh does not fit the configuration.
    """
    config = dataclasses.replace(config, model=config.model.padded_for(sizes.tensor))
    check_sharded(config, sizes)
    [memory] = (g.memory for g in GPUS.values() if g.device.device_kind == device_kind)
    if predict_memory(config, sizes).total > usable(memory):
        return None
    options: Any = {"network_bytes": config.network_bytes, "attention": attention}
    return predict(config, sizes, device_kind, **options).time.total


def _is_asked_for(sizes: MeshSizes, asked: MeshConfig) -> bool:
    """Whether axes of replicas and shards have the sizes that are asked for, of which 0 is any."""
    return asked.data in (0, sizes.data) and asked.fsdp in (0, sizes.fsdp)


def _sizes_before(config: Config) -> MeshSizes | None:
    """The mesh that a resumed run had; None if the run begins, or if nothing is known."""
    saved = saved_configuration(config).get(SAVED_SIZES)
    return None if saved is None else MeshSizes(**saved)
