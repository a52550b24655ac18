"""A router and its experts as a function of arrays, local or global.

Legend: h features of a token, E experts, k choices of a token, f hidden features of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import (
    axis_index,
    psum,
    tracks_varying_axes,
    vary_over,
    varying_axes,
)
from collective_matmul.layers import layer_checks
from collective_matmul.layers.experts.expert_axes import ExpertAxes
from collective_matmul.layers.experts.router import Router, RouterDecision, RouterParameters
from collective_matmul.layers.experts.router_statistics import RouterStatistics
from collective_matmul.layers.sequence_form import with_reference
from collective_matmul.layers.sharding_context import (
    GlobalArrays,
    LocalShards,
    ShardingContext,
    current_context,
    partition_spec,
)
from collective_matmul.operands.quantized import Quantized
from collective_matmul.ops.experts import checks
from collective_matmul.ops.experts.api import expert_mlp
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.biases import ExpertBiases, added_once
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.matmul import checks as matmul_checks
from collective_matmul.ops.matmul.checks import RecipeName


@dataclass(frozen=True)
class ExpertOptions:
    """Options of `collective_matmul.expert_mlp`, checked.

    Attributes:
      activation: as the op takes it.
      recompute_hidden: likewise.
      implementation: the names as a tuple, or None.
      grouped_implementation: likewise.
      fp8: as the op takes it.
    """

    activation: str
    recompute_hidden: bool
    implementation: tuple[str, ...] | None
    grouped_implementation: tuple[str, ...] | None
    fp8: RecipeName | None

    @classmethod
    def of(
        cls,
        activation: str,
        recompute_hidden: bool,
        implementation: str | Sequence[str] | None,
        grouped_implementation: str | Sequence[str] | None,
        fp8: RecipeName | None,
    ) -> ExpertOptions:
        """The options that the arguments of a layer name.

        Raises:
          ValueError, TypeError: for unknown names.
        """
        return cls(
            checks.activation(activation),
            bool(recompute_hidden),
            BACKENDS.requested(implementation),
            GROUPED_BACKENDS.requested(grouped_implementation),
            matmul_checks.fp8(fp8),
        )


def expert_context(
    axes: ExpertAxes, mesh: Mesh | AbstractMesh | None, arrays: Any
) -> ShardingContext:
    """The context of the caller, over all axes of the experts, and over those of data if global.

    Args:
      axes: the axes.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      arrays: a pytree of the arrays that the layer is called with.

    Raises:
      ValueError: if there is no mesh with these axes.
    """
    around = jax.sharding.get_abstract_mesh()
    data = tuple(axis for axis in axes.data_axes if axis not in around.manual_axes)
    names = axes.all_axes or data
    if not names:
        # Experts that are whole on each device need no mesh, but types of arrays may name one.
        return GlobalArrays("", around) if around.explicit_axes else LocalShards("")
    context = current_context(names[0], mesh, arrays, names[1:], data)
    if isinstance(context, LocalShards):
        return context
    return replace(context, further_axes=(*context.further_axes, *context.data_axes), data_axes=())


def routed_experts(
    context: ShardingContext,
    axes: ExpertAxes,
    router: Router,
    options: ExpertOptions,
    tokens: tuple[jax.Array, jax.Array | None],
    routing: RouterParameters,
    experts: tuple[ExpertWeights, ExpertBiases],
    dtype: Any,
) -> tuple[jax.Array, RouterStatistics]:
    """Each token's weighted sum over the experts that a router chooses, and its statistics.

    Args:
      context: whether the arrays are local or global.
      axes: how mesh axes divide them.
      router: the options of the router.
      options: the options of the op.
      tokens: x [..., h], and a mask [...] of tokens that the statistics count, or None.
      routing: the arrays of the router.
      experts: the weights of the experts, and their biases.
      dtype: dtype of the experts' computation.

    Returns:
      [..., h], and the statistics of all tokens or, if arrays are local, of this device's.

    Raises:
      ValueError: for shapes that do not fit each other.
    """
    x, mask = tokens
    layer_checks.input_features(x, (router.in_features,))
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(
            f"mask of shape {mask.shape}: expected {x.shape[:-1]}, one number for each token of x"
            f" of shape {x.shape}"
        )
    leading = axes.leading(context, x)
    is_global = isinstance(context, GlobalArrays)
    if is_global and isinstance(experts[0].gate, Quantized):
        raise ValueError(
            "w_gate: quantized, and arrays are global; expected local shards; call the layer inside"
            " jax.shard_map, or give it arrays"
        )
    weight_axis = axes.local_weight_axis  # Global weights are whole on shards.

    def on_shards(
        tokens: Any, routing: RouterParameters, experts: tuple[ExpertWeights, ExpertBiases]
    ) -> tuple[jax.Array, RouterStatistics]:
        x, mask = tokens
        flat = x.reshape(-1, x.shape[-1])
        routed = router.route(flat, None if mask is None else mask.reshape(-1), *routing)
        y = _apply_experts(axes, options, weight_axis, flat.astype(dtype), routed, *experts)
        statistics = routed.statistics
        if is_global:
            statistics = jax.tree.map(_sum_over_varying_axes, statistics)
        return y.reshape(x.shape), statistics

    mask_spec = None if mask is None else partition_spec(leading)
    specs = (
        (partition_spec(leading, None), mask_spec),
        RouterParameters(P(None, None), *(None if b is None else P(None) for b in routing[1:])),
        (axes.gathered_weight_specs, _specs_of(experts[1], axes.bias_specs)),
    )
    # One spec for all statistics: they are the same on all devices.
    out_specs = partition_spec(leading, None), P()
    return context.map_shards(on_shards, (tokens, routing, experts), specs, out_specs)


def _specs_of(biases: ExpertBiases, specs: ExpertBiases) -> ExpertBiases:
    """The specs of the biases that there are."""
    pairs = zip(biases, specs, strict=True)
    return ExpertBiases(*(None if bias is None else spec for bias, spec in pairs))


def _apply_experts(
    axes: ExpertAxes,
    options: ExpertOptions,
    weight_axis: str | None,
    x: jax.Array,
    routed: RouterDecision,
    ws: ExpertWeights,
    biases: ExpertBiases,
) -> jax.Array:
    """`expert_mlp` along the axes whose devices have different tokens; [T, h] -> [T, h].

    Along the others, every device applies its own experts, or its hidden features, to the tokens
    that all have, and results are added.
    """
    common = _common_axes(axes.all_axes, x)
    ids, weights = routed.expert_ids, routed.expert_weights
    if weight_axis is None:
        ws = ExpertWeights(*(w.astype(x.dtype) for w in ws))
    implementation = options.implementation
    if common:
        local = ws.gate.shape[0]
        ids = _numbers_without(ids, axes.expert_axes, common, local)
        implementation = with_reference(implementation)
    if axes.hidden_axis in common:
        biases = biases._replace(down=added_once(biases.down, axes.hidden_axis))
    arrays = x, ids, weights, ws, biases
    varying = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(arrays)))
    if varying:  # So that JAX sums the gradients of what does not vary, over these axes too.
        x, ids, weights, ws, biases = jax.tree.map(lambda array: vary_over(array, varying), arrays)
    y = expert_mlp(
        x,
        ids,
        weights,
        *ws,
        axis_name=tuple(axis for axis in axes.expert_axes if axis not in common),
        hidden_axis_name=None if axes.hidden_axis in common else axes.hidden_axis,
        activation=options.activation,
        recompute_hidden=options.recompute_hidden,
        fp8=options.fp8,
        weight_axis_name=weight_axis,
        b_gate=biases.gate,
        b_up=biases.up,
        b_down=biases.down,
        implementation=implementation,
        grouped_implementation=options.grouped_implementation,
    )
    for axis in common:
        y = psum(y, axis)
    return y


def _common_axes(names: Sequence[str], x: jax.Array) -> tuple[str, ...]:
    """The axes along which all devices have the same x, as its type says."""
    return tuple(
        axis for axis in names if tracks_varying_axes(axis) and axis not in varying_axes(x)
    )


def _numbers_without(
    ids: jax.Array, names: Sequence[str], common: Sequence[str], local: int
) -> jax.Array:
    """The experts' numbers among the devices that have this device's indices along `common`.

    Args:
      ids: numbers from 0 to E - 1.
      names: the axes that experts are divided over.
      common: axes to leave out.
      local: the experts of a device.

    Returns:
      Numbers as `expert_mlp` takes them over the other axes; -1 for experts of other devices.
    """
    device, number, stride = ids // local, ids % local, local
    is_here = jnp.ones(ids.shape, bool)
    for name in reversed(names):
        size = lax.axis_size(name)
        index, device = device % size, device // size
        if name in common:
            is_here &= index == axis_index(name)
        else:
            number += index * stride
            stride *= size
    return jnp.where(is_here, number, -1)


def _sum_over_varying_axes(value: jax.Array) -> jax.Array:
    for axis in sorted(varying_axes(value)):
        value = psum(value, axis)
    return value
