"""Column- and row-parallel linear maps of arrays, local or global, that all layers here call.

Legend of global shapes: S is the dimension that is sharded between layers (the sequence of a
transformer), K and N are features, D is the size of the axis, and s = S/D. *K and *N are several
feature dimensions, of which the first is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collective_matmul.checks import Implementation
from collective_matmul.layers import layer_checks
from collective_matmul.layers.sharding_context import ShardingContext, partition_spec, sharded
from collective_matmul.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter


def column_parallel(
    context: ShardingContext,
    x: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    kernel_shapes: Sequence[tuple[int, ...]],
    *,
    gather_dimension: int | None,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """``x @ kernel + bias`` for every kernel; x is gathered once.

    Args:
      context: whether the arrays are local or global.
      x: global [..., S, K], or local [..., s, K]; not sharded in S if `gather_dimension` is None.
      kernels: each global [K, *N], or local [K, N_0/D, *N_1...].
      biases: for each kernel None or [*N], sharded like the kernel's columns.
      kernel_shapes: the expected global shape of each kernel.
      gather_dimension: the dimension of x to gather; None for no gather.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape.

    Returns:
      For each kernel global [..., S, *N], sharded over the axis in the first feature dimension, or
      this device's shard of it.

    Raises:
      ValueError: for shapes that do not fit each other or the axis.
    """
    axis_name = context.axis_name
    for kernel, shape in zip(kernels, kernel_shapes, strict=True):
        layer_checks.features("out_features", shape[1:], axis_name, context.devices)
        layer_checks.kernel(kernel, shape, 1, context)
        layer_checks.input_features(x, shape[:1])
    gather = layer_checks.leading_dimension("gather_dimension", gather_dimension, x.ndim - 1)
    leading = context.leading_axes(x, x.ndim - 1)
    x_leading = sharded(leading, gather, axis_name)
    layer_checks.leading_sizes_divide("gather_dimension", gather_dimension, x, x_leading, context)

    def on_shards(x, kernels, biases):
        if gather is None:
            ys = tuple(jnp.tensordot(x, kernel, 1) for kernel in kernels)
        else:
            ys = all_gather_matmul(
                x, kernels, axis_name, gather_dimension=gather, implementation=implementation
            )
        return tuple(map(_add_bias, ys, biases))

    features = [(axis_name, *[None] * (len(shape) - 2)) for shape in kernel_shapes]
    in_specs = (
        partition_spec(x_leading, None),
        tuple(P(None, *names) for names in features),
        tuple(b if b is None else P(*names) for b, names in zip(biases, features, strict=True)),
    )
    out_specs = tuple(partition_spec(leading, *names) for names in features)
    return context.map_shards(on_shards, (x, tuple(kernels), tuple(biases)), in_specs, out_specs)


def row_parallel(
    context: ShardingContext,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    kernel_shape: tuple[int, ...],
    *,
    scatter_dimension: int | None,
    implementation: Implementation,
) -> jax.Array:
    """``x @ kernel + bias``, contracted over all feature dimensions and summed over the axis.

    Args:
      context: whether the arrays are local or global.
      x: global [..., S, *K], or local [..., S, K_0/D, *K_1...].
      kernel: global [*K, N], or local [K_0/D, *K_1..., N].
      bias: None or [N], the same on every device; added once, after the sum.
      kernel_shape: the expected global shape of the kernel.
      scatter_dimension: the dimension of the result to scatter; None for an all-reduce.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape.

    Returns:
      Global [..., S, N], sharded over the axis along `scatter_dimension`, or this device's shard of
      it; the same on every device if `scatter_dimension` is None.

    Raises:
      ValueError: for shapes that do not fit each other or the axis.
    """
    axis_name = context.axis_name
    layer_checks.features("in_features", kernel_shape[:-1], axis_name, context.devices)
    layer_checks.kernel(kernel, kernel_shape, 0, context)
    layer_checks.input_features(x, kernel.shape[:-1])
    count = x.ndim - kernel.ndim + 1
    scatter = layer_checks.leading_dimension("scatter_dimension", scatter_dimension, count)
    leading = context.leading_axes(x, count)
    y_leading = sharded(leading, scatter, axis_name)
    layer_checks.leading_sizes_divide("scatter_dimension", scatter_dimension, x, y_leading, context)

    def on_shards(x, kernel, bias):
        x, kernel = x.reshape(*x.shape[:count], -1), kernel.reshape(-1, kernel.shape[-1])
        if scatter is None:
            y = matmul_all_reduce(x, kernel, axis_name, implementation=implementation)
        else:
            y = matmul_reduce_scatter(
                x, kernel, axis_name, scatter_dimension=scatter, implementation=implementation
            )
        return _add_bias(y, bias)

    features = (axis_name, *[None] * (kernel.ndim - 2))
    bias_spec = bias if bias is None else P(None)
    in_specs = (partition_spec(leading, *features), P(*features, None), bias_spec)
    out_specs = partition_spec(y_leading, None)
    return context.map_shards(on_shards, (x, kernel, bias), in_specs, out_specs)


def _add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[..., *N] + [*N]."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
