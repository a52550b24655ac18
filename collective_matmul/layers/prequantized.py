"""Kernels of nnx layers that are quantized once, for several calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from collective_matmul.layers.experts.experts import ExpertMLP
from collective_matmul.layers.linear.blocks import AttentionProjection, GatedFeedForward
from collective_matmul.layers.linear.functions import own_columns
from collective_matmul.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from collective_matmul.layers.parallelize.nnx_adapters import base_of
from collective_matmul.layers.parallelize.nnx_shared import shared_layers
from collective_matmul.layers.sharding_context import LocalShards
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.quantized import array_of
from collective_matmul.ops.experts.prequantize_experts import quantized_stacks, shards_of_matrices
from collective_matmul.ops.matmul.prequantize import prequantize

Linear = ColumnParallelLinear | RowParallelLinear


def prequantize_kernels(model: nnx.Module, *, weight_axis_name: str | None = None) -> nnx.State:
    """The state of a model, with kernels that layers multiply in 8 bits as `Quantized`.

    So do the weights of an `ExpertMLP`'s experts, which `prequantize_experts` describes.

    For use inside `jax.shard_map` over the axis of the layers, where parameters are local shards.
    ``nnx.merge(nnx.graphdef(model), state)`` computes what the model does and quantizes no kernel.
    In gradients with respect to the state, `Quantized.array` is the kernel's gradient. See
    `prequantize`.

    Kernels are quantized in `dtype` of their layer, or in their own if it has none. Layers of
    `AttentionProjection` and `GatedFeedForward` that share a gather are quantized together, and so
    are those of `Shared`. Kernels stay arrays in layers without `fp8`, and in column-parallel
    layers that do not gather.

    In layers with `weight_axis_name`, kernels are shards, and so are their copies: each call
    gathers one of the two. With the argument of that name, so are kernels of other layers that the
    axis shards by their metadata. Their layers take them when they are whole: see
    `Quantized.gathered`. They stay arrays where the axis shards neither the first of the
    input features nor the first of the output features.

    Args:
      model: a module with `ColumnParallelLinear` or `RowParallelLinear` layers inside. It is not
        changed. If it calls `shared_gather` itself, the result raises ValueError where it is used.
      weight_axis_name: an axis of the `shard_map` that shards kernels of layers which do not know
        of it; or None.
    """
    model = nnx.clone(model)
    for layers in _gathers(model):
        first = layers[0]
        gathers = not isinstance(first, ColumnParallelLinear) or first.gather_dimension is not None
        if first.fp8 is None or not gathers:
            continue
        sharding = _sharding(first, weight_axis_name)
        if sharding is None or any(_sharding(e, weight_axis_name) != sharding for e in layers):
            continue
        parameters: list[Any] = [layer.kernel for layer in layers]
        axis_name, dimension = sharding
        quantized = prequantize(
            [_matrix(layer) for layer in layers],
            first.fp8,
            weight_axis_name=axis_name,
            weight_dimension=dimension,
        )
        for parameter, each in zip(parameters, quantized, strict=True):
            parameter.set_value(each.with_array(array_of(parameter.get_value())))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertMLP) and module.options.fp8 is not None:
            _quantize_experts(module, module.options.fp8, weight_axis_name)
    return nnx.state(model)


def _quantize_experts(layer: ExpertMLP, fp8: str, weight_axis_name: str | None) -> None:
    """Quantizes the weights of experts, unless their number is sharded further."""
    parameters = layer.w_gate, layer.w_up, layer.w_down
    own = layer.axes.local_weight_axis
    if own is not None:
        sharding: list[Any] = [(own, 1)] * 3
    else:
        sharding = [_stack_sharding(layer, w, weight_axis_name) for w in parameters]
    if None in sharding or sharding[0] != sharding[1]:
        return
    values = [w.get_value() for w in parameters]
    cast = [w if layer.dtype is None else w.astype(layer.dtype) for w in values]
    of_up, of_down = (shards_of_matrices(*each) for each in sharding[1:])
    quantized = quantized_stacks(cast, FORMATS[fp8], of_up, of_down)
    for parameter, each, value in zip(parameters, quantized, values, strict=True):
        parameter.set_value(each.with_array(value))


def _stack_sharding(
    layer: ExpertMLP, parameter: Any, weight_axis_name: str | None
) -> tuple[str | None, int] | None:
    """The axis that shards a stack [E, K, N] of matrices by its metadata, and the dimension.

    The axis is None if matrices are whole. The result is None if it shards their number further.
    """
    sharded = _sharded_dimensions(parameter, weight_axis_name)
    if not sharded or weight_axis_name in layer.axes.all_axes:
        return None, 0
    return None if sharded[0] == -3 else (weight_axis_name, 3 + sharded[0])


def _gathers(model: nnx.Module) -> Iterator[list[Linear]]:
    """The linear layers of a model, those that share a gather together."""
    modules = [module for _, module in nnx.iter_modules(model)]
    shared: set[int] = set()
    for module in modules:
        group: list[Any] = []
        if isinstance(module, AttentionProjection):
            group = [module.query, module.key, module.value]
        elif isinstance(module, GatedFeedForward):
            group = [module.gate, module.up]
        else:
            group = [base_of(getattr(module, name)) for name in shared_layers(module)]
        if group:
            shared.update(map(id, group))
            yield group
    for module in modules:
        if isinstance(module, Linear) and id(module) not in shared:
            yield [module]


def _sharding(layer: Linear, weight_axis_name: str | None) -> tuple[str | None, int] | None:
    """The axis that shards the kernel of a layer as a matrix [K, *N], and the dimension.

    The axis is None if the kernel is whole. Neither is known if the shards are none of the matrix.
    """
    if layer.weight_axis_name is not None:
        own = LocalShards(layer.axis_name).weight_shards(layer.weight_sharding)
        return (None, 0) if own is None else (own.axis_name, own.dimension)
    sharded = _sharded_dimensions(layer.kernel, weight_axis_name)
    if not sharded:
        return None, 0
    inputs, outputs = map(len, layer.kernel_shape)
    computes_all = not isinstance(layer, ColumnParallelLinear) or layer.copies == 1
    if sharded[0] == -outputs and computes_all:
        return weight_axis_name, 1
    return (weight_axis_name, 0) if sharded[0] == -inputs - outputs else None


def _sharded_dimensions(parameter: Any, axis_name: str | None) -> list[int]:
    """The dimensions that an axis shards by the metadata of a parameter, none for no axis.

    Counted from the end, as a parameter of stacked layers has a dimension more in front.
    """
    (spec,) = jax.tree.leaves(
        nnx.get_partition_spec(nnx.State({"parameter": parameter})),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    return [
        place - len(spec)
        for place, names in enumerate(spec)
        if axis_name is not None and axis_name in (names if isinstance(names, tuple) else (names,))
    ]


def _matrix(layer: Linear) -> Any:
    """The kernel [*K, *N] as [K, *N], with this device's columns, in the dtype of the matmul."""
    kernel, inputs = layer.kernel.get_value(), len(layer.kernel_shape[0])
    if isinstance(layer, ColumnParallelLinear):
        kernel = own_columns(LocalShards(layer.axis_name), kernel, inputs, layer.copies)
    matrix = kernel.reshape(-1, *kernel.shape[inputs:])
    return matrix if layer.dtype is None else matrix.astype(layer.dtype)
