"""ZeRO: which shards of weights and gradients a device has, and when they travel.

Rajbhandari et al., "ZeRO", 2020. From level 1 on, parameters and moments are sharded over the fsdp
axis, and each device updates its shards. Levels differ in what happens before::

    level  weights, in compute dtype                 gradients, over fsdp
    0      parameters are whole on every device      summed, once per step
    1      gathered once per step                    reduce-scattered, once per step
    2      gathered once per step                    reduce-scattered by each backward
    3      gathered by each block, forward and       reduce-scattered by each backward
           backward, and freed

Gradients are summed over the data axis once per step. What is done once per step is done for each
parameter as soon as its gradient is there: without accumulation, while the backward goes on. The
functions here are for use inside a `shard_map` over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from train.config import Config, MeshSizes
from train.mesh import BATCH_AXES
from train.state import ModelFunctions, Params


def gathered_weights(model: ModelFunctions, params: Params) -> Params:
    """What the model computes with: local parameters, with weights whole where it expects them."""
    if model.zero not in (1, 2):
        return params
    shards = model.weight_shards
    return {
        name: shards[name].gather(leaf) if name in shards else leaf for name, leaf in params.items()
    }


def local_weights(model: ModelFunctions, params: Params) -> Params:
    """The same, typed as varying over data and fsdp: JAX sums no gradients over them."""
    return _local(gathered_weights(model, params))


def variables(model: ModelFunctions, params: Params) -> tuple[Params, Callable[[Params], Params]]:
    """What to differentiate with respect to, typed as `local_weights` are, and a function from it
    to what the model takes."""
    weights = local_weights(model, params)
    if model.zero == 1:
        return weights, lambda variables: variables
    if model.zero != 2:
        return _local(params), lambda variables: variables

    def attached(variables: Params) -> Params:
        shards = model.weight_shards
        return {
            name: shards[name].attach(leaf, weights[name]) if name in shards else leaf
            for name, leaf in variables.items()
        }

    return _local(params), attached


def summed_gradients(model: ModelFunctions, gradients: Params) -> Params:
    """The sums over data and fsdp of gradients with respect to the variables.

    Args:
      model: the model.
      gradients: gradients of this device's sequences, float32 or compute dtype, local.

    Returns:
      float32 gradients of the local parameters.
    """

    def summed(name: str, gradient: jax.Array) -> jax.Array:
        shards = model.weight_shards.get(name)
        if shards is None:
            return _sum(gradient, BATCH_AXES, model.gradient_dtype)
        if model.zero == 1:
            gradient = shards.scatter(gradient)
        replicas = [axis for axis in BATCH_AXES if axis != shards.axis_name]
        return _sum(gradient, replicas, model.gradient_dtype)

    return {name: summed(name, gradient) for name, gradient in gradients.items()}


def describe_zero(config: Config, model: ModelFunctions, sizes: MeshSizes) -> list[str]:
    """What is sharded over the fsdp axis, as lines to print; none if nothing was asked for."""
    if config.zero and not model.zero:
        return [
            f"zero={config.zero}: nothing is sharded, as mesh.fsdp=1; give --mesh.fsdp more devices"
        ]
    if not model.zero:
        return []
    what = "parameters and optimizer state"
    if model.zero > 1:
        what = "parameters, gradients and optimizer state"
    if model.zero == 3:
        what += ", and weights in use"
    lines = [f"zero={model.zero}: {what} are sharded over fsdp={sizes.fsdp}"]
    if whole := model.whole_matrices:
        lines.append(
            f"mesh.fsdp={sizes.fsdp} does not divide {len(whole)} matrices, which stay whole:"
            f" {', '.join(whole[:3])}{', ...' * (len(whole) > 3)}"
        )
    return lines


def _sum(gradient: jax.Array, axes: Sequence[str], dtype: str) -> jax.Array:
    return lax.psum(gradient.astype(dtype), tuple(axes)).astype(jnp.float32)


def _local(params: Params) -> Params:
    """The same, typed as varying over the axes of the batch."""

    def vary(leaf: jax.Array) -> jax.Array:
        varying = jax.typeof(leaf).manual_axis_type.varying
        missing = tuple(axis for axis in BATCH_AXES if axis not in varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, params)
