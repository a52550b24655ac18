"""The loss of a step and its gradients over global arrays, on mesh axes of type Explicit.

There is no `shard_map` over the mesh: the types of arrays say how they are sharded.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap
from models import explicit
from train.config.config import Config
from train.parallel.batches import Batch
from train.parallel.mesh import BATCH_AXES
from train.parallel.model import ModelFunctions, Params

Tree = Any


def with_explicit_axes(
    step: Callable[[Tree, Batch], tuple[Tree, Tree]], specs: Tree, mesh: Mesh | AbstractMesh
) -> Callable[[Tree, Batch], tuple[Tree, Tree]]:
    """A step of global arrays whose types say how they are sharded.

    Args:
      step: (state, batch) -> (state, metrics), traced with all axes Explicit.
      specs: the specs of the state.
      mesh: the mesh, whose axes are Auto. May be abstract.
    """
    axes = _batch_axes(mesh)

    def typed(state: Tree, batch: Batch) -> tuple[Tree, Tree]:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        with jax.sharding.use_abstract_mesh(abstract):
            shardings = specs, jax.tree.map(lambda _: P(axes), batch)
            explicit_step: Any = jax.sharding.explicit_axes(step, in_sharding=shardings)
            new_state, metrics = explicit_step(state, batch)
            return lax.with_sharding_constraint((new_state, metrics), (specs, P()))

    return typed


def _batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that shard the batch. One of one device would be one more to sum gradients over."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1) or BATCH_AXES[:1]


def required_sites(model: ModelFunctions) -> int:
    """The number of sites that `overlap` has to find in the loss of a step."""
    if model.zero != 3:  # Weights are gathered once per step, before.
        return explicit.count_sites()
    names = (re.sub(r"^layers\.\d+\.", "layers.", name) for name in model.sharded_dimensions)
    return explicit.count_sites({*names})


def explicit_loss_and_grads(
    config: Config, model: ModelFunctions, params: Params, batch: Batch, *, rewrite: bool
) -> tuple[dict[str, jax.Array], Params]:
    """Mean loss of the whole batch, as "loss", and its gradient with respect to the global
    parameters.

    With `rewrite` the loss is passed to `overlap` before it is differentiated: the gradients are
    those of the library's ops, as with its layers.
    """
    variables = _variables(model, params)
    gathered = _gathered_weights(model, variables)
    tokens: jax.Array | int = config.batch_size * config.sequence_length
    if "answers" in batch:
        tokens = jnp.maximum(jnp.sum(batch["answers"]), 1)

    def loss(variables: Params, microbatch: Batch) -> jax.Array:
        inputs, targets = microbatch["inputs"], microbatch["targets"]
        documents = microbatch.get("document_lengths")
        weights: dict[str, Any] = variables | {
            name: explicit.GatheredWeight(variables[name], weight)
            for name, weight in gathered.items()
        }
        each = explicit.loss(model.merge(weights), config.model, inputs, targets, documents)
        if "answers" in microbatch:
            each *= microbatch["answers"]
        return jnp.sum(each) / tokens

    overlapped = loss
    if rewrite:
        overlapped = overlap(loss, require=required_sites(model), fp8=model.fp8_scopes)

    def loss_and_grads(microbatch: Batch) -> tuple[jax.Array, Params]:
        total, grads = jax.value_and_grad(overlapped)(variables, microbatch)
        return total, jax.tree.map(lambda p, g: g.astype(p.dtype), params, grads)

    if not model.accumulates:
        total, grads = loss_and_grads(batch)
        return {"loss": total}, grads

    def add(total: tuple[jax.Array, Params], microbatch: Batch) -> tuple[Any, None]:
        one = loss_and_grads(microbatch)
        with jax.named_scope("gradient_accumulation"):
            return jax.tree.map(jnp.add, total, one), None

    cut = functools.partial(_microbatches, config.gradient_accumulation_steps)
    nothing = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    (total, grads), _ = lax.scan(add, nothing, jax.tree.map(cut, batch))
    return {"loss": total}, grads


@jax.named_scope("weights")
def _variables(model: ModelFunctions, params: Params) -> Params:
    """The variables of differentiation: the parameters, with matrices in the dtype in which
    they are used. ZeRO level 3 casts these where it gathers them."""
    if model.zero == 3:
        return params
    return {
        name: leaf.astype(model.compute_dtype) if name in model.matrices else leaf
        for name, leaf in params.items()
    }


@jax.named_scope("weights")
def _gathered_weights(model: ModelFunctions, variables: Params) -> Params:
    """The weights that ZeRO levels 1 and 2 gather once per step."""
    if model.zero == 3:
        return {}
    dtype = model.compute_dtype
    return {n: explicit.whole(variables[n], "tensor", dtype) for n in model.sharded_dimensions}


def _microbatches(count: int, array: jax.Array) -> jax.Array:
    """[batch_size, n] -> [count, batch_size / count, n]. Each device cuts its own sequences."""
    sharding = jax.typeof(array).sharding
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    n = array.shape[-1]
    array = array.reshape(devices, count, -1, n, out_sharding=P(axes))
    return jnp.swapaxes(array, 0, 1).reshape(count, -1, n, out_sharding=P(None, axes))
