"""ZeRO: which shards of weights and gradients a device has, and when they travel.

Rajbhandari et al., "ZeRO", 2020. From level 1 on, parameters and moments are sharded over the fsdp
axis, and over a context axis too, and each device updates its shards. Levels differ in what happens
before::

    level  weights, in compute dtype                 gradients, over fsdp
    0      cast once per step                        summed
    1      gathered once per step                    reduce-scattered
    2      gathered once per step                    reduce-scattered by each backward
    3      gathered by each block, or by each        reduce-scattered by each backward
           matmul, forward and backward, and freed

Over fsdp means over context too, if the mesh has such an axis: its devices have other tokens of the
same sequences. Gradients are summed over the data axis as well. Without accumulation, the backward
sums and scatters those of each block as soon as they are there, while it goes on. With
accumulation, what the table does not say of each backward is done once per step. The functions here
are for use inside a `shard_map` over the mesh.

Where some parameters are frozen, levels 1 and 2 do the same: what is trained is gathered in float32
by each forward, and each backward scatters its gradients; frozen weights are not sharded over fsdp.
With level 3 kernels are, frozen or not, and each matmul gathers its own, frozen ones in the dtype
or format in which they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from collective_matmul import Quantized
from models.parameters.use import arrays_of, as_float32, as_varying
from train.config.config import Config, MeshSizes
from train.config.experts import expert_axes
from train.parallel.kept_weights import Magnitudes
from train.parallel.mesh import shard_axes_of, token_axes
from train.parallel.model import ModelFunctions, Params, Weights
from train.parallel.parameter_shards import gather, replica_axes, scatter, sum_over


@jax.named_scope("weights")
def gathered_weights(
    model: ModelFunctions, params: Params, kept: Mapping[str, Any] | None = None
) -> Weights | None:
    """Makes, once per step, local parameters, with weights whole and in compute dtype; None
    if each use makes its weights.

    With accumulation, weights that layers multiply in 8 bits are `Quantized`: quantized
    once, for all microbatches. With level 3 they always are, and of shards: each use gathers the
    copy that it needs, in 8 bits. Other parameters are as they were.

    Args:
      model: the model.
      params: local parameters.
      kept: what the step before has made of them, weights in compute dtype or `Magnitudes`;
        default: nothing.
    """
    if model.freezes:
        return None
    if model.zero == 3:
        return model.prequantize(params) if model.quantizes_shards else None
    dimensions, kept = model.sharded_dimensions, kept or {}

    def made(name: str, leaf: jax.Array) -> jax.Array | Quantized:
        if name in dimensions:
            return gather(leaf, dimensions[name], model.compute_dtype)
        if name not in model.matrices:
            return leaf
        before = kept.get(name, leaf)
        if isinstance(before, Magnitudes):
            return before.weight(leaf.astype(model.compute_dtype))
        return before.astype(model.compute_dtype)

    gathered: Weights = {name: made(name, leaf) for name, leaf in params.items()}
    return model.prequantize(gathered) if model.accumulates else gathered


@jax.named_scope("weights")
def whole_trained(model: ModelFunctions, params: Params) -> Params:
    """Local parameters beside frozen ones, gathered over fsdp in float32. They are few. Where this
    is differentiated, JAX scatters their gradients."""
    if not model.freezes:
        return params
    dimensions = model.sharded_dimensions
    return {
        name: gather(leaf, dimensions[name], "float32")
        if name in dimensions and name in model.specs and not model.gathered_by_layers(name)
        else leaf
        for name, leaf in params.items()
    }


def variables(model: ModelFunctions, params: Params, gathered: Weights | None) -> Params:
    """The variables of differentiation.

    Without accumulation they are the local parameters. With it, each device accumulates gradients
    of its own sequences: the variables are typed as varying over data and fsdp, so that JAX does
    not sum their gradients. What is not scattered by each backward is differentiated with respect
    to the weights.

    Args:
      model: the model.
      params: local parameters.
      gathered: what `gathered_weights` returns.
    """
    if not model.accumulates:
        return params
    own = arrays_of(gathered) if gathered is not None and model.zero < 2 else params
    return {name: as_varying(leaf, token_axes()) for name, leaf in own.items()}


@jax.named_scope("weights")
def summed_gradients(model: ModelFunctions, gradients: Params) -> Params:
    """The sums over data and fsdp of accumulated gradients of the variables.

    Args:
      model: the model.
      gradients: gradients of this device's sequences, float32, local.

    Returns:
      float32 gradients of the local parameters.
    """
    if not model.accumulates:
        return gradients

    def summed(name: str, gradient: jax.Array) -> jax.Array:
        dimension = model.sharded_dimensions.get(name)
        if dimension is not None and model.zero == 1 and not model.freezes:
            gradient = scatter(gradient, dimension, model.gradient_dtype)
        return sum_over(gradient, replica_axes(model.specs[name]), model.gradient_dtype)

    return as_float32({name: summed(name, gradient) for name, gradient in gradients.items()})


def describe_zero(config: Config, model: ModelFunctions, sizes: MeshSizes) -> list[str]:
    """Describes what fsdp shards or replicates, in lines to print; none without one."""
    if config.zero and not model.zero:
        return [nothing_sharded(config)]
    where = " × ".join(f"{axis}={sizes.by_axis[axis]}" for axis in shard_axes_of(sizes))
    if not model.zero:
        return [] if sizes.weight_shards == 1 else [_replicated(config, where)]
    what = "parameters and optimizer state"
    if model.zero > 1 or model.freezes:
        what = "parameters, gradients and optimizer state"
    lines = [f"zero={model.zero}: {what} are sharded over {where}"]
    if model.freezes:
        lines[0] += ", of what is trained"
        frozen = "each of these devices has the frozen weights"
        if model.zero == 3:
            frozen = "frozen kernels are sharded too, and gathered by each matmul"
        lines.append(frozen)
    elif model.zero == 3:
        how = "block by block, one block ahead"
        if model.gathers == "matmuls" or config.overlap == "rewrite-jit":
            how = "in the loops of their matmuls"
        dtypes = model.compute_dtype
        if model.quantizes_shards:
            dtypes += ", those of linear layers with fp8 in 8 bits"
        lines.append(f"weights are gathered {how}, in {dtypes}")
    if whole := model.whole_matrices:
        lines.append(
            f"mesh.{where.replace(' × ', ' × mesh.')} does not divide {sum(whole.values())}"
            f" matrices, which stay whole: {', '.join([*whole][:3])}{', ...' * (len(whole) > 3)}"
        )
    return lines


def nothing_sharded(config: Config) -> str:
    """Says that a level of ZeRO does nothing, as one device has all sequences of a replica."""
    return (
        f"zero={config.zero}: nothing is sharded, as mesh.fsdp=1; give --mesh.fsdp more devices, or"
        " leave out --zero"
    )


def _replicated(config: Config, where: str) -> str:
    experts = ", apart from experts," if "fsdp" in expert_axes(config) else ""
    return (
        f"zero=0: each device of {where} has all parameters{experts} with their gradients and"
        " optimizer state; --zero 3 shards them"
    )
