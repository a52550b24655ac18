"""The loss of a step and its gradients over global arrays, on mesh axes of type Explicit.

There is no `shard_map` over the mesh: the types of arrays say how they are sharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from models import explicit
from train.config import Config
from train.mesh import BATCH_AXES
from train.state import ModelFunctions, Params, TrainState

Batch = dict[str, jax.Array]


def with_explicit_axes(
    step: Callable[[TrainState, Batch], tuple[TrainState, Any]],
    specs: TrainState,
    mesh: Mesh | AbstractMesh,
) -> Callable[[TrainState, Batch], tuple[TrainState, Any]]:
    """A step of global arrays whose types say how they are sharded.

    Args:
      step: (state, batch) -> (state, metrics), traced with all axes Explicit.
      specs: the specs of the state.
      mesh: the mesh, whose axes are Auto. May be abstract.
    """
    # An axis of one device would be one more to sum gradients over.
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1) or BATCH_AXES[0]

    def typed(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        with jax.sharding.use_abstract_mesh(abstract):
            shardings = specs, jax.tree.map(lambda _: P(axes), batch)
            explicit_step: Any = jax.sharding.explicit_axes(step, in_sharding=shardings)
            new_state, metrics = explicit_step(state, batch)
            return lax.with_sharding_constraint((new_state, metrics), (specs, P()))

    return typed


def explicit_loss_and_grads(
    config: Config, model: ModelFunctions, params: Params, batch: Batch
) -> tuple[jax.Array, Params]:
    """Mean loss of the whole batch, and its gradient with respect to the global parameters."""
    tokens: jax.Array | int = config.batch_size * config.sequence_length
    if "answers" in batch:
        tokens = jnp.maximum(jnp.sum(batch["answers"]), 1)

    def loss(params: Params, microbatch: Batch) -> jax.Array:
        inputs, targets = microbatch["inputs"], microbatch["targets"]
        documents = microbatch.get("document_lengths")
        each = explicit.loss(model.merge(params), config.model, inputs, targets, documents)
        if "answers" in microbatch:
            each *= microbatch["answers"]
        return jnp.sum(each) / tokens

    loss_and_grads = jax.value_and_grad(loss)
    if config.gradient_accumulation_steps == 1:
        return loss_and_grads(params, batch)

    def add(total: tuple[jax.Array, Params], microbatch: Batch) -> tuple[Any, None]:
        one = loss_and_grads(params, microbatch)
        with jax.named_scope("gradient_accumulation"):
            return jax.tree.map(jnp.add, total, one), None

    cut = functools.partial(_microbatches, config.gradient_accumulation_steps)
    nothing = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, nothing, jax.tree.map(cut, batch))[0]


def _microbatches(count: int, array: jax.Array) -> jax.Array:
    """[batch_size, n] -> [count, batch_size / count, n]. Each device cuts its own sequences."""
    sharding = jax.typeof(array).sharding
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    n = array.shape[-1]
    array = array.reshape(devices, count, -1, n, out_sharding=P(axes))
    return jnp.swapaxes(array, 0, 1).reshape(count, -1, n, out_sharding=P(None, axes))
