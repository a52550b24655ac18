"""Bytes of a run on each device, computed by tracing alone, and how to make a run fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.documents import DOCUMENTS_OF_ONE_PACK
from models.llama import Remat
from train.config import Config, MeshSizes
from train.mesh import BATCH_AXES, make_abstract_mesh
from train.state import ModelFunctions, TrainState, make_optimizer, state_on_mesh
from train.step import BATCH_SPEC, Batch, losses
from train.zero import local_weights


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
      parameters: the float32 parameters.
      optimizer_state: the optimizer's moments.
      gradients: the float32 gradients.
      weights: the gathered weights, in the dtype in which they are used.
      saved: what the forward of one microbatch saves for its backward: activations, and without
        ZeRO weights in the dtype in which they are used.
    """

    parameters: int
    optimizer_state: int
    gradients: int
    weights: int
    saved: int

    @property
    def state(self) -> int:
        """What does not depend on the batch or on remat."""
        return self.parameters + self.optimizer_state + self.gradients + self.weights

    @property
    def total(self) -> int:
        """All of it. Temporary arrays come on top."""
        return self.state + self.saved


def memory_of(
    config: Config,
    mesh: AbstractMesh,
    model: ModelFunctions | None = None,
    state: TrainState | None = None,
) -> Memory:
    """The memory of a run.

    Args:
      config: the configuration.
      mesh: the mesh; which attention is used depends on its kind of device.
      model: the model of the configuration, if it is at hand.
      state: shapes, dtypes and shardings of the state, from `state_on_mesh`, if they are at hand.
    """
    model = model or ModelFunctions(config, MeshSizes(**mesh.shape))
    state = state or state_on_mesh(model, make_optimizer(config.optimizer, config.steps), mesh)
    parameters = _bytes_per_device(state["params"])
    whole = _bytes_per_device(_on_mesh(state["params"], model.unsharded_specs, mesh))
    # Without accumulation, a gradient is scattered as soon as it is there.
    accumulated = model.zero == 1 and config.gradient_accumulation_steps > 1
    return Memory(
        parameters,
        _bytes_per_device(state["opt_state"]),
        whole if accumulated else parameters,
        _gathered_bytes(model, mesh),
        _saved_for_backward(config, model, mesh),
    )


def _gathered_bytes(model: ModelFunctions, mesh: AbstractMesh) -> int:
    """Bytes per device of gathered weights."""
    weights = {
        name: jax.ShapeDtypeStruct(model.abstract_params[name].shape, shards.dtype)
        for name, shards in model.weight_shards.items()
    }
    return _bytes_per_device(_on_mesh(weights, model.unsharded_specs, mesh))


def advice(config: Config, mesh: AbstractMesh, memory: Memory, limit: int) -> str:
    """The flags that make a run fit which does not, those that cost least time first.

    Args:
      config: the configuration.
      mesh: the mesh.
      memory: the memory of the run.
      limit: bytes of a device.
    """
    sizes = MeshSizes(**mesh.shape)
    tensor = sizes.tensor
    tensors = [n for n in range(tensor, 4 * tensor + 1) if config.model.fits_tensor_axis(n)]
    largest = max(tensor, *(n for n in range(1, 129) if config.model.fits_tensor_axis(n)))
    # The state is sharded over the tensor axis alone, up to a few vectors.
    if memory.state * tensor / largest > limit:
        least = memory.state * tensor // largest
        return (
            f"no flag makes it fit: parameters, gradients and optimizer state alone take about"
            f" {least:,} bytes with --mesh.tensor {largest}, the largest that fits the"
            " model; use a smaller model or a GPU with more memory"
        )
    for size in tensors:
        if memory.state * tensor / size > limit:
            continue
        for changed, flags in _cheaper(config, sizes.data * sizes.fsdp):
            larger = make_abstract_mesh(sizes._replace(tensor=size), mesh.abstract_device)
            total = memory_of(changed, larger).total
            if total <= limit:
                if size != tensor:
                    flags = [f"--mesh.tensor {size}", *flags]
                return f"it fits with {' '.join(flags)}, which leaves {limit - total:,} bytes"
    return (
        f"it fits with more --mesh.tensor than {tensors[-1]}, or with a shorter --sequence-length"
    )


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


def abstract_batch(config: Config, sequences: int) -> Batch:
    """Global shapes and dtypes of a batch."""
    tokens = jax.ShapeDtypeStruct((sequences, config.sequence_length), jnp.int32)
    batch: dict[str, Any] = {"inputs": tokens, "targets": tokens}
    if config.separate_documents:
        # The text knows how many there are. Attention saves most for as many as one call takes.
        documents = min(DOCUMENTS_OF_ONE_PACK, config.sequence_length)
        batch["document_lengths"] = jax.ShapeDtypeStruct((sequences, documents), jnp.int32)
    return batch


def _on_mesh(
    shapes: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, P], mesh: AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes with shardings."""
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs[name])
        )
        for name, leaf in shapes.items()
    }


def _bytes_per_device(tree: Any) -> int:
    """The bytes of one device's shards."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _saved_for_backward(config: Config, model: ModelFunctions, mesh: AbstractMesh) -> int:
    """Bytes per device that the forward of one microbatch saves for its backward."""
    saved = 0

    def forward(params, batch):
        nonlocal saved

        def loss(weights):
            return jnp.sum(losses(model, weights, batch))

        weights = local_weights(model, params)
        value, backward = jax.vjp(loss, weights)
        residuals = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        for leaf in weights.values():
            residuals.pop(id(leaf), None)
        saved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in residuals.values())
        return jax.lax.psum(value, BATCH_AXES)

    traced = jax.shard_map(
        forward, mesh=mesh, in_specs=(model.specs, BATCH_SPEC), out_specs=P(), check_vma=True
    )
    sequences = config.batch_size // config.gradient_accumulation_steps
    jax.eval_shape(traced, model.abstract_params, abstract_batch(config, sequences))
    return saved
