"""Flax's linen attention with its heads divided over the axis and one gather for q, k and v."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax.sharding import AbstractMesh, Mesh

from collective_matmul.layers.linear.functions import column_parallel
from collective_matmul.layers.linear.linear import SharedProjections
from collective_matmul.layers.parallelize.linen_specs import CACHES, unboxed
from collective_matmul.layers.parallelize.parallel_styles import Heads
from collective_matmul.layers.parallelize.placement import keep_heads_divided
from collective_matmul.layers.sharding_context import ShardingContext

#: The modules that Heads takes. Each has options that change what its layers compute, and the only
#: values that are supported. `linen.MultiHeadAttention` inherits its `__call__`.
ATTENTION_MODULES: dict[type, dict[str, Any]] = {
    kind: {
        "precision": None,
        "qkv_dot_general": None,
        "out_dot_general": None,
        "qkv_dot_general_cls": None,
        "out_dot_general_cls": None,
    }
    for kind in (linen.MultiHeadDotProductAttention, linen.SelfAttention)
}

INPUTS = ("inputs_q", "inputs_k", "inputs_v", "inputs_kv")


def shared_projections(
    module: Any,
    args: Any,
    kwargs: Any,
    context: ShardingContext,
    style: Heads,
    implementation: tuple[str, ...] | None,
) -> dict[str, Any]:
    """The arguments of an attention module by name, its inputs replaced by their projections.

    Args:
      module: one of `ATTENTION_MODULES`.
      args: the positional arguments of its call.
      kwargs: the keyword arguments of its call.
      context: whether the arrays are local or global.
      style: says which dimension of the inputs to gather, and how operands are quantized.
      implementation: which backends execute the matmuls; None chooses for each shape.
    """
    arguments = dict(
        inspect.signature(type(module).__call__).bind(module, *args, **kwargs).arguments
    )
    del arguments["self"]
    query = arguments["inputs_q"]
    both = arguments.get("inputs_kv")
    key = _first(arguments.get("inputs_k"), both, query)
    inputs = {"query": query, "key": key, "value": _first(arguments.get("inputs_v"), both, key)}
    ready = isinstance(query, SharedProjections)  # SelfAttention calls the class that it inherits.
    if ready or not {*inputs, "out"} <= set(module.variables.get("params", {})):
        return arguments
    by_input: dict[int, SharedProjections] = {}
    for x in inputs.values():
        names = [name for name, other in inputs.items() if other is x]
        if id(x) not in by_input:
            results = _project(module, x, names, context, style, implementation)
            by_input[id(x)] = SharedProjections(x.shape, dict(zip(names, results, strict=True)))
    for name in INPUTS:
        if arguments.get(name) is not None:
            arguments[name] = by_input[id(arguments[name])]
    return arguments


def _project(
    module: Any,
    x: jax.Array,
    names: list[str],
    context: ShardingContext,
    style: Heads,
    implementation: tuple[str, ...] | None,
) -> tuple[jax.Array, ...]:
    """The results of the layers `names` for x, [..., S, heads, features of a head] each."""
    parameters = [unboxed(module.variables["params"][name]) for name in names]
    layers = [(layer["kernel"], layer.get("bias")) for layer in parameters]
    arrays = promote_dtype(x, *(a for layer in layers for a in layer), dtype=module.dtype)
    x, kernels, biases = arrays[0], arrays[1::2], arrays[2::2]
    return column_parallel(
        context,
        x,
        kernels,
        biases,
        [(kernel.shape[:-2], (module.num_heads, kernel.shape[-1])) for kernel in kernels],
        gather_dimension=style.gather_dimension,
        implementation=implementation,
        fp8=style.fp8,
    )


def keep_caches_divided(
    module: Any, arguments: dict[str, Any], axis_name: str, mesh: Mesh | AbstractMesh | None
) -> None:
    """Keeps the sharding of the caches in a decoding step, where the mesh is known.

    Args:
      module: the attention module.
      arguments: as `shared_projections` returns them.
      axis_name: the mesh axis.
      mesh: the mesh, or None.
    """
    inputs = [arguments.get(name) for name in INPUTS]
    shared = [x.results for x in inputs if isinstance(x, SharedProjections)]
    keys = [results["key"] for results in shared if "key" in results]
    if mesh is None or not keys or not module.is_mutable_collection("cache"):
        return
    for name in CACHES:
        if module.has_variable("cache", name):
            value = module.get_variable("cache", name)
            kept = keep_heads_divided(value, keys[0], axis_name, mesh)
            module.put_variable("cache", name, kept)


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)
