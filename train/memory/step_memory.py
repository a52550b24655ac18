"""Bytes of a run on each device, computed by tracing alone, and how to make a run fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh

from collective_matmul.jaxprs import scratch_bytes
from models.blocks.rematerialization import Remat
from train.config.checks import check
from train.config.config import Config, MeshConfig, MeshSizes, Zero
from train.config.context import sequence_unit
from train.config.experts import on_tensor_axis
from train.memory.live_memory import find_peak
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import FROZEN, WEIGHTS, state_on_mesh
from train.parallel.batches import abstract_batch
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions
from train.step import sharded_step

#: Estimates have been up to 1.3 times what a trace says.
_FAR = 1.4


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
      parameters: the float32 parameters, and those that are frozen.
      optimizer_state: the optimizer's moments.
      weights: arrays made of parameters: those that the state has, and others, as gathered weights
        and copies in 8 bits are, when most bytes are in use.
      activations: all other arrays at that time: activations and gradients. And what kernels of
        other libraries allocate, at any time: XLA's plan holds its memory for the whole step.
    """

    parameters: int
    optimizer_state: int
    weights: int
    activations: int

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch or on remat."""
        return self.parameters + self.optimizer_state

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.weights + self.activations


def memory_of(config: Config, mesh: AbstractMesh, *, local_devices: int | None = None) -> Memory:
    """The memory of a run.

    Args:
      config: the configuration.
      mesh: the mesh; which attention is used depends on its kind of device.
      local_devices: number of devices of a process; None: all.
    """
    same = config
    # The plain model takes the same memory. What overlap makes of it is traced for its table.
    # Shapes under jax.jit are global: those of the same model in shard_map are a device's.
    if config.overlap == "rewrite-jit":
        # It quantizes weights where they are used, and keeps no copies of all of them.
        config = dataclasses.replace(config, overlap="auto", fp8=None)
        # With level 1, its backward shards the gradients of each microbatch, as with level 2.
        same = dataclasses.replace(config, zero=2 if config.zero == 1 else config.zero)
    model = ModelFunctions(same, MeshSizes(**mesh.shape), local_devices)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state, batch = state_on_mesh(model, optimizer, mesh), abstract_batch(config)
    step = sharded_step(config, model, optimizer, mesh, rewrite=False)
    jaxpr = jax.make_jaxpr(step)(state, batch).jaxpr
    peak = find_peak(jaxpr, len(jaxpr.invars) - len(batch))
    return Memory(
        _bytes_per_device([state["params"], state.get(FROZEN, {})]),
        _bytes_per_device(state["opt_state"]),
        _bytes_per_device(state.get(WEIGHTS, {})) + peak.of_first,
        peak.total - peak.of_first + scratch_bytes(jaxpr),
    )


def advice(
    config: Config,
    mesh: AbstractMesh,
    memory: Memory,
    limit: int,
    local_devices: int | None = None,
    estimate: Callable[[Config, MeshSizes], float] | None = None,
) -> str:
    """The flags that make a run fit which does not, those that cost least time first.

    Meshes of as many devices are tried before larger ones, whose number of devices is named.

    Args:
      config: the configuration.
      mesh: the mesh.
      memory: the memory of the run.
      limit: bytes of a device that a prediction may have.
      local_devices: number of devices of a process; None: all.
      estimate: returns about the bytes of a run, in less time than a trace of a model takes: of
        runs that are far too large by it, nothing is traced.
    """
    sizes = MeshSizes(**mesh.shape)
    shards, most = _shards(config, sizes), _longest_tensor_axis(config, sizes, local_devices)
    tried: list[tuple[int, Config, MeshSizes]] = [(memory.total, config, sizes)]

    def fitting(ways: Iterable[tuple[Zero, MeshSizes]]) -> str | None:
        for zero, larger in ways:
            sharded = dataclasses.replace(config, zero=zero)
            if memory.state * shards / _shards(sharded, larger) > limit:
                continue
            if larger != sizes and not _is_possible(sharded, larger):
                continue
            for changed in _cheaper(sharded, larger.data * larger.fsdp):
                if found := traced(changed, larger):
                    return found
        return None

    def traced(changed: Config, larger: MeshSizes) -> str | None:
        if estimate is not None and estimate(changed, larger) > _FAR * limit:
            return None
        if (changed, larger) == (config, sizes):
            total = memory.total
        else:
            abstract = make_abstract_mesh(larger, mesh.abstract_device)
            total = memory_of(changed, abstract, local_devices=local_devices).total
        if total <= limit:
            return _it_fits(config, changed, sizes, larger, total)
        tried.append((total, changed, larger))
        return None

    told = fitting(_of_as_many_devices(config, sizes, most))
    _, least, its_mesh = min(tried, key=lambda each: each[0])
    if told is None and _sums_in_float32(least, its_mesh):
        told = traced(dataclasses.replace(least, gradient_dtype="bfloat16"), its_mesh)
    told = told or fitting(_of_more_devices(config, sizes, most))
    if told is not None:
        return told
    if memory.state > limit:
        return _advice_about_state(config, sizes, memory, limit)
    ways = ["a shorter --sequence-length"]
    if config.overlap not in ("rewrite", "rewrite-jit"):
        ways.insert(0, f"more --mesh.context than {8 * sizes.context}")
    if most >= 4 * sizes.tensor:
        ways.insert(0, f"more --mesh.tensor than {4 * sizes.tensor}")
    return f"it fits with {', or with '.join(ways)}"


def _advice_about_state(config: Config, sizes: MeshSizes, memory: Memory, limit: int) -> str:
    """Advises where no sequence is short enough: more shards, fewer moments, other GPUs."""
    devices = -(-memory.state * _shards(config, sizes) // limit)
    fsdp = 1 << (-(-devices // sizes.tensor) - 1).bit_length()
    ways = [
        f"--zero 3 --mesh.fsdp {fsdp} or more, with a --batch-size that it divides",
        "a smaller model",
        "GPUs with more memory",
    ]
    if config.lora.rank is None:
        ways.insert(1, "--lora.rank 16, which has moments of adapters alone")
    return (
        f"parameters and optimizer state alone take {memory.state:,} bytes of each device, however"
        f" short sequences are; use {'; '.join(ways)}"
    )


def _shards(config: Config, sizes: MeshSizes) -> int:
    """The number of devices that share the state."""
    return sizes.tensor * (sizes.weight_shards if config.zero else 1)


def _longest_tensor_axis(config: Config, sizes: MeshSizes, local_devices: int | None) -> int:
    """The most devices of a tensor axis that is advised: those of a process, unless the run's own
    axis spans several, or may."""
    four_times = 4 * sizes.tensor
    if local_devices is None or config.distributed.tensor_across_processes:
        return four_times
    return min(four_times, max(local_devices, sizes.tensor))


def _is_possible(config: Config, sizes: MeshSizes) -> bool:
    """Whether a run on such a mesh would not be refused."""
    try:
        check(dataclasses.replace(config, mesh=MeshConfig(*sizes)), sizes)
    except ValueError:
        return False
    return True


def _sums_in_float32(config: Config, sizes: MeshSizes) -> bool:
    """Whether gradients are summed over devices in float32, and may be in bfloat16."""
    dtypes = config.compute_dtype, config.gradient_dtype
    return sizes.data * sizes.fsdp > 1 and dtypes == ("bfloat16", "float32")


def _of_as_many_devices(
    config: Config, sizes: MeshSizes, most: int
) -> Iterator[tuple[Zero, MeshSizes]]:
    yield config.zero, sizes
    groups = _in_one_group(sizes)
    for mesh in dict.fromkeys((sizes, groups)):
        if mesh.weight_shards > 1:
            same = config.zero if mesh == sizes else 0
            yield from ((zero, mesh) for zero in get_args(Zero) if zero > same)
    for tensor in _longer_tensor_axes(config, sizes, most):
        fsdp, left = divmod(groups.fsdp * sizes.tensor, tensor)
        if left == 0:
            mesh = groups._replace(fsdp=fsdp, tensor=tensor)
            yield 3 if mesh.weight_shards > 1 else 0, mesh


def _of_more_devices(
    config: Config, sizes: MeshSizes, most: int
) -> Iterator[tuple[Zero, MeshSizes]]:
    for tensor in _longer_tensor_axes(config, sizes, most):
        yield config.zero, sizes._replace(tensor=tensor)
    groups = _in_one_group(sizes)
    if config.overlap not in ("rewrite", "rewrite-jit"):
        for factor in (2, 4, 8):
            larger = sizes._replace(context=factor * sizes.context)
            if config.sequence_length % sequence_unit(larger) == 0:
                yield config.zero, larger
    fsdp = 2 * groups.fsdp
    while config.batch_size % fsdp == 0:
        yield 3, groups._replace(fsdp=fsdp)
        fsdp *= 2


def _in_one_group(sizes: MeshSizes) -> MeshSizes:
    """The mesh with all replicas on the fsdp axis."""
    return MeshSizes(1, sizes.data * sizes.fsdp, sizes.tensor, sizes.context)


def _longer_tensor_axes(config: Config, sizes: MeshSizes, most: int) -> list[int]:
    fits = on_tensor_axis(config).fits_tensor_axis
    return [tensor for tensor in range(sizes.tensor + 1, most + 1) if fits(tensor)]


#: The fields that advice changes, beside the mesh.
_ADVISED = ("zero", "gradient_dtype", "remat", "gradient_accumulation_steps")


def _it_fits(config: Config, changed: Config, old: MeshSizes, new: MeshSizes, total: int) -> str:
    """A sentence with the flags that change a configuration and its mesh."""
    flags = [
        f"--mesh.{name} {size}"
        for name, size in new._asdict().items()
        if size != getattr(old, name)
    ]
    flags += [
        f"--{name.replace('_', '-')} {getattr(changed, name)}"
        for name in _ADVISED
        if getattr(changed, name) != getattr(config, name)
    ]
    where = f" on {new.devices} devices" if new.devices > old.devices else ""
    how = f"with {' '.join(flags)}, and then" if flags else "as it is, and"
    return f"it fits{where} {how} takes {total:,} bytes"


def _cheaper(config: Config, groups: int) -> Iterator[Config]:
    """The configuration with ever less saved for the backward."""
    levels = get_args(Remat)
    least_rows = config.batch_size // groups  # One sequence at a time on each device.
    for remat in levels[levels.index(config.remat) :]:
        for steps in dict.fromkeys((config.gradient_accumulation_steps, least_rows)):
            yield dataclasses.replace(config, remat=remat, gradient_accumulation_steps=steps)


def _bytes_per_device(tree: Any) -> int:
    """The bytes of one device's shards."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
