"""Kernels of nnx layers that are quantized once, for several calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from collective_matmul.layers.blocks import AttentionProjection, GatedFeedForward
from collective_matmul.layers.linear import ColumnParallelLinear, RowParallelLinear
from collective_matmul.layers.sharding_context import LocalShards
from collective_matmul.quantized_weights import prequantize

Linear = ColumnParallelLinear | RowParallelLinear


def prequantize_kernels(model: nnx.Module) -> nnx.State:
    """The state of a model, with kernels that layers multiply in 8 bits as `QuantizedWeight`.

    For use inside `jax.shard_map` over the axis of the layers, where parameters are local shards.
    ``nnx.merge(nnx.graphdef(model), state)`` computes what the model does and quantizes no kernel.
    In gradients with respect to the state, `QuantizedWeight.array` is the kernel's gradient. See
    `prequantize`.

    Kernels are quantized in `dtype` of their layer, or in their own if it has none. Layers of
    `AttentionProjection` and `GatedFeedForward` that share a gather are quantized together. Kernels
    stay arrays in layers without `fp8`, in column-parallel layers that do not gather, and in layers
    with `weight_axis_name`.

    Args:
      model: a module with `ColumnParallelLinear` or `RowParallelLinear` layers inside. It is not
        changed. If it calls `shared_gather` itself, the result raises ValueError where it is used.
    """
    model = nnx.clone(model)
    for layers in _gathers(model):
        first = layers[0]
        gathers = not isinstance(first, ColumnParallelLinear) or first.gather_dimension is not None
        if first.fp8 is None or not gathers or first.weight_axis_name is not None:
            continue
        parameters: list[Any] = [layer.kernel for layer in layers]
        quantized = prequantize([_matrix(layer) for layer in layers], first.fp8)
        for parameter, each in zip(parameters, quantized, strict=True):
            parameter.set_value(each.with_array(parameter.get_value()))
    return nnx.state(model)


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
        if group:
            shared.update(map(id, group))
            yield group
    for module in modules:
        if isinstance(module, Linear) and id(module) not in shared:
            yield [module]


def _matrix(layer: Linear) -> Any:
    """The kernel [*K, *N] as [K, *N], with this device's columns, in the dtype of the matmul."""
    kernel, inputs = layer.kernel.get_value(), len(layer.kernel_shape[0])
    if isinstance(layer, ColumnParallelLinear):
        kernel = layer._computed(kernel, inputs, LocalShards(layer.axis_name))
    matrix = kernel.reshape(-1, *kernel.shape[inputs:])
    return matrix if layer.dtype is None else matrix.astype(layer.dtype)
