"""Column- and row-parallel linear maps of arrays, local or global, that all layers here call.

Legend of global shapes: S is the dimension that is sharded between layers (the sequence of a
transformer), D is the size of the axis, and s = S/D. *K and *N are one or several dimensions of
input and output features. The first of *N is sharded by column-parallel layers, the first of *K by
row-parallel ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear.lora import Adapter
from collective_matmul.layers.sequence_form import (
    gathered_dimension,
    scattered_dimension,
    with_reference,
)
from collective_matmul.layers.sharding_context import (
    LocalShards,
    ShardingContext,
    WeightSharding,
    kernel_spec,
    partition_spec,
    sharded,
)
from collective_matmul.operands.quantized import Quantized, array_of
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.api import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.frozen import local_matmul_frozen
from collective_matmul.ops.matmul.frozen_api import (
    all_gather_matmul_frozen,
    matmul_reduce_scatter_frozen,
)
from collective_matmul.ops.matmul.gradients import gather_weight

#: The sizes of a kernel's contracted dimensions [*K], and of its other dimensions [*N].
KernelShape = tuple[tuple[int, ...], tuple[int, ...]]


def column_parallel(
    context: ShardingContext,
    x: jax.Array,
    kernels: Sequence[jax.Array | Quantized],
    biases: Sequence[jax.Array | None],
    kernel_shapes: Sequence[KernelShape],
    *,
    weight_sharding: WeightSharding | None = None,
    gather_dimension: int | None,
    implementation: tuple[str, ...] | None,
    fp8: RecipeName | None = None,
    frozen: bool = False,
    adapters: Sequence[Adapter | None] = (),
) -> tuple[jax.Array, ...]:
    """``x @ kernel + bias`` for every kernel; x is gathered once.

    Args:
      context: whether the arrays are local or global.
      x: global [..., S, *K], or local [..., s, *K]; not sharded in S if `gather_dimension` is None
        or the axis does not divide S: see `sequence_form`.
      kernels: each global [*K, *N], or local [*K, N_0/D, *N_1...], which may be quantized.
      biases: for each kernel None or [*N], sharded like the kernel's columns.
      kernel_shapes: the expected global shape of each kernel. All have the same [*K].
      weight_sharding: the second axis of the kernels; None if they have none.
      gather_dimension: the dimension of x to gather; None for no gather. Negative numbers count
        from the features as if they were one dimension.
      implementation: which backends execute the matmuls; None chooses for each shape.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format,
        as the ops take it.
      frozen: whether kernels have no gradient; always with adapters.
      adapters: none, or for each kernel None or its adapter: A [prod(K), r], B [r, *N], of which N
        is sharded like the kernel's.

    Returns:
      For each kernel global [..., S, *N], sharded over the axis in the first feature dimension, or
      this device's shard of it.

    Raises:
      ValueError: for shapes that do not fit each other or the axis.
    """
    axis_name, contracted = context.axis_name, len(kernel_shapes[0][0])
    leading = context.leading_axes(x, count := x.ndim - contracted)
    shards = context.weight_shards(weight_sharding, leading)
    _check_columns(context, x, kernels, kernel_shapes, shards)
    gather = layer_checks.leading_dimension("gather_dimension", gather_dimension, count)
    gather = gathered_dimension(context, x, gather, leading)
    adapters = tuple(adapters) or (None,) * len(kernels)

    def on_shards(x, kernels, biases, adapters):
        x = x.reshape(*x.shape[:count], -1)
        kernels = tuple(kernel.reshape(-1, *kernel.shape[contracted:]) for kernel in kernels)
        kernels, keywords = _kernels_of_op(kernels, x, shards)
        columns = [() if a is None else (a.columns(x, axis_name),) for a in adapters]
        options: dict[str, Any] = {"implementation": implementation, "fp8": fp8}
        if gather is None:
            ys = _local_products(x, kernels, shards, frozen=frozen)
        elif frozen:
            options |= {"gather_dimension": gather, "shards": shards}
            ys, columns = _gathered_beside(x, columns, kernels, axis_name, **options)
        else:
            keywords |= {"gather_dimension": gather, **options}
            ys = all_gather_matmul(x, kernels, axis_name, **keywords)
        ys = map(_in_features, ys, itertools.repeat(count), kernel_shapes)
        ys = map(_add_adapter, ys, columns, adapters)
        return tuple(map(_add_bias, ys, biases))

    columns = [(axis_name, *[None] * (len(outputs) - 1)) for _, outputs in kernel_shapes]
    x_spec = partition_spec(sharded(leading, gather, axis_name), *[None] * contracted)
    over = weight_sharding if shards else None
    kernel_specs = tuple(
        _kernel_spec(shape, contracted, axis_name, over) for shape in kernel_shapes
    )
    in_specs = x_spec, kernel_specs, *_column_specs(columns, biases, adapters)
    out_specs = tuple(partition_spec(leading, *names) for names in columns)
    operands = x, tuple(kernels), tuple(biases), adapters
    return context.map_shards(on_shards, operands, in_specs, out_specs)


def _check_columns(
    context: ShardingContext,
    x: jax.Array,
    kernels: Sequence[jax.Array | Quantized],
    shapes: Sequence[KernelShape],
    shards: WeightShards | None,
) -> None:
    """Raises ValueError unless x and kernels of column-parallel layers fit each other."""
    for kernel, (inputs, outputs) in zip(kernels, shapes, strict=True):
        layer_checks.features("out_features", outputs, context.axis_name, context.devices)
        layer_checks.kernel(kernel, (inputs, outputs), len(inputs), context, shards)
        layer_checks.input_features(x, inputs)


def own_columns(context: ShardingContext, parameter: Any, dimension: int, copies: int) -> Any:
    """A parameter of a column-parallel layer as if each device had columns of its own.

    Args:
      context: whether the parameter is local or global; it is whole in both, if there are copies.
      parameter: None, or an array, which may be quantized.
      dimension: the dimension of it that the columns are.
      copies: the number of devices that compute the same columns. N columns are in D / copies parts
        of n.

    Returns:
      Global [..., D * n, ...], or this device's [..., n, ...]; without copies the parameter itself.
    """
    if parameter is None or copies == 1:
        return parameter
    if isinstance(parameter, Quantized):  # Of these columns, and the array of all.
        return parameter.with_array(own_columns(context, parameter.array, dimension, copies))
    before, (size, *after) = parameter.shape[:dimension], parameter.shape[dimension:]
    own = size * copies // context.devices
    if isinstance(context, LocalShards):
        first = jax.lax.axis_index(context.axis_name) // copies * own
        return jax.lax.dynamic_slice_in_dim(parameter, first, own, dimension)
    parts = parameter.reshape(*before, size // own, own, *after)
    return jnp.repeat(parts, copies, dimension).reshape(*before, size * copies, *after)


def _kernel_spec(
    shape: KernelShape, dimension: int, axis_name: str, weights: WeightSharding | None
) -> P:
    """The spec of a kernel, of which the axis shards a dimension: see `kernel_spec`."""
    inputs, outputs = shape
    return P(*kernel_spec((len(inputs), len(outputs)), dimension, axis_name, weights))


def _column_specs(columns: Any, biases: Any, adapters: Any) -> tuple[Any, Any]:
    """The specs of biases and adapters, of which `columns` are the axes."""
    return (
        tuple(b if b is None else P(*names) for b, names in zip(biases, columns, strict=True)),
        tuple(a and a.specs((), (None, *n)) for a, n in zip(adapters, columns, strict=True)),
    )


def _gathered_beside(
    x: jax.Array, columns: Sequence[tuple[jax.Array, ...]], *arguments: Any, **options: Any
) -> tuple[tuple[jax.Array, ...], list[tuple[jax.Array, ...]]]:
    """`all_gather_matmul_frozen` of the columns of all kernels, those of each kernel together."""
    flat = tuple(itertools.chain(*columns))
    ys, gathered = all_gather_matmul_frozen(x, flat, *arguments, **options)
    arrived = iter(gathered)
    return ys, [tuple(next(arrived) for _ in each) for each in columns]


def row_parallel(
    context: ShardingContext,
    x: jax.Array,
    kernel: jax.Array | Quantized,
    bias: jax.Array | None,
    kernel_shape: KernelShape,
    *,
    weight_sharding: WeightSharding | None = None,
    scatter_dimension: int | None,
    implementation: tuple[str, ...] | None,
    fp8: RecipeName | None = None,
    frozen: bool = False,
    adapter: Adapter | None = None,
) -> jax.Array:
    """``x @ kernel + bias``, contracted over all feature dimensions and summed over the axis.

    Args:
      context: whether the arrays are local or global.
      x: global [..., S, *K], or local [..., S, K_0/D, *K_1...].
      kernel: global [*K, *N], or local [K_0/D, *K_1..., *N], which may be quantized.
      bias: None or [*N], the same on every device; added once, after the sum.
      kernel_shape: the expected global shape of the kernel.
      weight_sharding: the second axis of the kernel; None if it has none.
      scatter_dimension: the dimension of the result to scatter; None for an all-reduce. Negative
        numbers count from the features as if they were one dimension.
      implementation: which backends execute the matmuls; None chooses for each shape.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format,
        as the ops take it.
      frozen: whether the kernel has no gradient; always with an adapter.
      adapter: None, or A [prod(K), r], of which K is sharded like the kernel's, and B [r, *N].

    Returns:
      Global [..., S, *N], sharded over the axis along `scatter_dimension`, or this device's shard
      of it; the same on every device if `scatter_dimension` is None or the axis does not divide S:
      see `sequence_form`.

    Raises:
      ValueError: for shapes that do not fit each other or the axis.
    """
    axis_name, (inputs, outputs) = context.axis_name, kernel_shape
    layer_checks.features("in_features", inputs, axis_name, context.devices)
    leading = context.leading_axes(x, count := x.ndim - len(inputs))
    shards = context.weight_shards(weight_sharding, leading)
    layer_checks.kernel(kernel, kernel_shape, 0, context, shards)
    layer_checks.input_features(x, (inputs[0] // context.parameter_shards, *inputs[1:]))
    requested = layer_checks.leading_dimension("scatter_dimension", scatter_dimension, count)
    scatter = scattered_dimension(context, x, requested, leading)

    def on_shards(x, kernel, bias, adapter):
        x = x.reshape(*x.shape[:count], -1)
        kernel = kernel.reshape(-1, *kernel.shape[len(inputs) :])
        (kernel,), keywords = _kernels_of_op([kernel], x, shards)
        keywords["fp8"] = fp8
        undivided = scatter is None and requested is not None
        names = with_reference(implementation) if undivided else implementation
        if frozen:
            options = {"scatter_dimension": scatter, "shards": shards, "implementation": names}
            columns = () if adapter is None else (adapter.columns(x, axis_name),)
            frozen_op = functools.partial(matmul_reduce_scatter_frozen, fp8=fp8, **options)
            y, columns = frozen_op(x, columns, kernel, axis_name)
            y = _add_adapter(y.reshape(*y.shape[:count], *outputs), columns, adapter)
        elif scatter is None:
            y = matmul_all_reduce(x, kernel, axis_name, implementation=names, **keywords)
        else:
            keywords |= {"scatter_dimension": scatter, "implementation": implementation}
            y = matmul_reduce_scatter(x, kernel, axis_name, **keywords)
        return _add_bias(y, bias)

    rows, whole = (axis_name, *[None] * (len(inputs) - 1)), [None] * len(outputs)
    bias_spec = bias if bias is None else P(*whole)
    adapter_spec = adapter and adapter.specs((axis_name, None), (None, *whole))
    spec = _kernel_spec(kernel_shape, 0, axis_name, weight_sharding if shards else None)
    in_specs = (partition_spec(leading, *rows), spec, bias_spec, adapter_spec)
    out_specs = partition_spec(sharded(leading, scatter, axis_name), *whole)
    return context.map_shards(on_shards, (x, kernel, bias, adapter), in_specs, out_specs)


def _local_products(
    x: jax.Array,
    kernels: Sequence[jax.Array | Quantized],
    shards: WeightShards | None,
    *,
    frozen: bool,
) -> tuple[jax.Array, ...]:
    """``x @ kernel`` for each kernel, where x is not gathered."""
    arrays = tuple(map(array_of, kernels))
    if shards is not None:
        arrays = tuple(cast(jax.Array, gather_weight(kernel, shards, x.dtype)) for kernel in arrays)
    if not frozen:
        return tuple(jnp.tensordot(x, kernel, 1) for kernel in arrays)
    x = vary_over(x, varying_axes(arrays[0]))  # Its gradient is summed over the layer's axis.
    return tuple(local_matmul_frozen(x, w.reshape(w.shape[0], -1)) for w in arrays)


def _in_features(y: jax.Array, count: int, shape: KernelShape) -> jax.Array:
    """[..., N] -> [..., N_0/D, N_1...]. A frozen `Quantized` is a matrix, and so is its product."""
    return y.reshape(*y.shape[:count], -1, *shape[1][1:])


def _add_adapter(
    y: jax.Array, columns: tuple[jax.Array, ...], adapter: Adapter | None
) -> jax.Array:
    """[..., *N] + [..., r] @ [r, *N]."""
    if adapter is None:
        return y
    b = vary_over(adapter.b, varying_axes(y))
    return y + jnp.tensordot(columns[0], b.astype(y.dtype), 1)


def _add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[..., *N] + [*N]."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def _kernels_of_op(
    kernels: Sequence[jax.Array | Quantized], x: jax.Array, shards: WeightShards | None
) -> tuple[tuple[jax.Array | Quantized, ...], dict[str, Any]]:
    """Kernels as an op takes them, and its arguments about them; it casts shards itself."""
    if shards is None:
        return tuple(kernel.astype(x.dtype) for kernel in kernels), {}
    keywords = {"weight_axis_name": shards.axis_name, "weight_dimension": shards.dimension}
    return tuple(kernels), keywords
