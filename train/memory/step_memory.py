"""Bytes of a run on each device, computed by tracing alone, and how to make a run fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh

from collective_matmul.jaxprs import scratch_bytes
from models.blocks.rematerialization import Remat
from train.config.config import Config, MeshSizes, Zero
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
    shards = _shards(config, sizes)
    for zero, larger in _more_shards(config, sizes):
        sharded = dataclasses.replace(config, zero=zero)
        if memory.state * shards / _shards(sharded, larger) > limit:
            continue
        abstract = make_abstract_mesh(larger, mesh.abstract_device)
        for changed, flags in _cheaper(sharded, larger.data * larger.fsdp):
            if estimate is not None and estimate(changed, larger) > _FAR * limit:
                continue
            total = memory_of(changed, abstract, local_devices=local_devices).total
            if total <= limit:
                flags = [*_mesh_flags(config, zero, sizes, larger), *flags]
                how = f"with {' '.join(flags)}, and then" if flags else "as it is, and"
                return f"it fits {how} takes {total:,} bytes"
    if memory.state > limit:
        return _advice_about_state(config, sizes, memory, limit)
    more = f"more --mesh.tensor than {4 * sizes.tensor}"
    if config.overlap not in ("rewrite", "rewrite-jit"):
        more += f", with more --mesh.context than {8 * sizes.context}"
    return f"it fits with {more}, or with a shorter --sequence-length"


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


def _more_shards(config: Config, sizes: MeshSizes) -> Iterator[tuple[Zero, MeshSizes]]:
    """ZeRO levels and meshes over which ever more is sharded: first those of as many devices."""
    yield config.zero, sizes
    groups = MeshSizes(1, sizes.data * sizes.fsdp, sizes.tensor, sizes.context)
    for mesh in dict.fromkeys((sizes, groups)):
        if mesh.weight_shards > 1:
            same = config.zero if mesh == sizes else 0
            yield from ((zero, mesh) for zero in get_args(Zero) if zero > same)
    for tensor in range(sizes.tensor + 1, 4 * sizes.tensor + 1):
        if on_tensor_axis(config).fits_tensor_axis(tensor):
            yield config.zero, sizes._replace(tensor=tensor)
    if config.overlap not in ("rewrite", "rewrite-jit"):
        for factor in (2, 4, 8):
            larger = sizes._replace(context=factor * sizes.context)
            if config.sequence_length % sequence_unit(larger) == 0:
                yield config.zero, larger
    fsdp = 2 * groups.fsdp
    while config.batch_size % fsdp == 0:
        yield 3, groups._replace(fsdp=fsdp)
        fsdp *= 2


def _mesh_flags(config: Config, zero: Zero, old: MeshSizes, new: MeshSizes) -> list[str]:
    """The flags that change a mesh and the ZeRO level."""
    flags = [
        f"--mesh.{name} {size}"
        for name, size in new._asdict().items()
        if size != getattr(old, name)
    ]
    return flags + [f"--zero {zero}"] * (zero != config.zero)


def _cheaper(config: Config, groups: int) -> Iterator[tuple[Config, list[str]]]:
    """The configuration with ever less saved for the backward, and the flags that make it so."""
    levels = get_args(Remat)
    least_rows = config.batch_size // groups  # One sequence at a time on each device.
    for remat in levels[levels.index(config.remat) :]:
        for steps in dict.fromkeys((config.gradient_accumulation_steps, least_rows)):
            changed = dataclasses.replace(config, remat=remat, gradient_accumulation_steps=steps)
            flags = []
            if remat != config.remat:
                flags.append(f"--remat {remat}")
            if steps != config.gradient_accumulation_steps:
                flags.append(f"--gradient-accumulation-steps {steps}")
            yield changed, flags


def _bytes_per_device(tree: Any) -> int:
    """The bytes of one device's shards."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
