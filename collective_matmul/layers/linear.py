"""Flax nnx modules: linear layers that are column- or row-parallel over a mesh axis.

Legend of global shapes: S is the dimension that is sharded between layers (the sequence of a
transformer), D is the size of the axis, and s = S/D. Inside a `shard_map` over the axis, parameters
and activations are local shards. Elsewhere they are global, and the layer enters `shard_map`
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Required, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from jax.sharding import Mesh
from jax.typing import DTypeLike

from collective_matmul.checks import Implementation
from collective_matmul.checks import implementation as check_implementation
from collective_matmul.layers import layer_checks
from collective_matmul.layers.functions import column_parallel, row_parallel
from collective_matmul.layers.sharding_context import current_context, known_axis_size

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class LinearOptions(TypedDict, total=False):
    """Options that modules built from linear layers pass on: see `ColumnParallelLinear`."""

    use_bias: bool
    implementation: Implementation
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    rngs: Required[nnx.Rngs]


class ColumnParallelLinear(nnx.Module):
    """A linear layer with output features sharded over a mesh axis. It gathers x, then multiplies.

    ``layer(x)`` equals ``x @ kernel + bias``. Shapes of the call::

        global  x [..., S, in_features] -> [..., S, *out_features], sharded in out_features[0]
        local   x [..., s, in_features] -> [..., S, out_features[0]/D, *out_features[1:]]

    The parameters, and what `nnx.get_partition_spec` returns for them::

        kernel  [in_features, *out_features]    P(None, axis_name, ...)
        bias    [*out_features]                 P(axis_name, ...)

    Args:
      in_features: size of x's last dimension.
      out_features: one size or several; the first is divisible by the size of the axis.
      axis_name: the mesh axis, of size D.
      gather_dimension: the dimension of x that is sharded between layers; negative numbers count
        from the features. None: x is the same on every device and is not gathered.
      use_bias: whether to add a bias.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape. See `collective_matmul.backends`.
      dtype: dtype of the computation and of the communicated arrays; None promotes x and the
        parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer, called with the shape [in_features, product of out_features].
      bias_init: initializer, called with the shape [product of out_features].
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      rngs: random keys for the initial parameters.

    Raises:
      ValueError: by the constructor, if the axis has a known size that does not divide the output
        features; by the call, if sizes do not fit or no mesh is known. Nothing is compiled before.
    """

    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        axis_name: str = "tensor",
        gather_dimension: int | None = -2,
        use_bias: bool = False,
        implementation: Implementation = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        bias_init: nnx.Initializer = _BIAS_INIT,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        (self.in_features,) = layer_checks.sizes("in_features", (in_features,))
        self.out_features = layer_checks.sizes("out_features", out_features)
        self.axis_name, self.mesh = axis_name, mesh
        self.gather_dimension = gather_dimension
        self.implementation = check_implementation(implementation)
        self.dtype = dtype
        if devices := known_axis_size(axis_name, mesh):
            layer_checks.features("out_features", self.out_features, axis_name, devices)
        columns = math.prod(self.out_features)
        names = (axis_name, *[None] * (len(self.out_features) - 1))
        kernel = kernel_init(rngs.params(), (in_features, columns), param_dtype)
        self.kernel = _param(kernel.reshape(in_features, *self.out_features), (None, *names))
        if use_bias:
            bias = bias_init(rngs.params(), (columns,), param_dtype)
            self.bias = _param(bias.reshape(self.out_features), names)
        else:
            self.bias = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., S, in_features] -> [..., S, *out_features]; for local shapes see the class."""
        return shared_gather(x, [self])[0]


class RowParallelLinear(nnx.Module):
    """A linear layer with input features sharded over a mesh axis. It multiplies, then scatters.

    ``layer(x)`` equals ``x @ kernel + bias``, contracted over all input features. Shapes of the
    call::

        global  x [..., S, *in_features] -> [..., S, out_features], sharded in S
        local   x [..., S, in_features[0]/D, *in_features[1:]] -> [..., s, out_features]

    The parameters, and what `nnx.get_partition_spec` returns for them::

        kernel  [*in_features, out_features]    P(axis_name, ...)
        bias    [out_features]                  P(None), added once, after the sum

    Args:
      in_features: one size or several; the first is divisible by the size of the axis.
      out_features: size of the result's last dimension.
      axis_name: the mesh axis, of size D.
      scatter_dimension: the dimension of the result to shard; negative numbers count from the
        features. None: the sum is the same on every device.
      use_bias: whether to add a bias.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape. See `collective_matmul.backends`.
      dtype: dtype of the computation and of the communicated arrays; None promotes x and the
        parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer, called with the shape [product of in_features, out_features].
      bias_init: initializer, called with the shape [out_features].
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      rngs: random keys for the initial parameters.

    Raises:
      ValueError: by the constructor, if the axis has a known size that does not divide the input
        features; by the call, if sizes do not fit or no mesh is known. Nothing is compiled before.
    """

    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int,
        *,
        axis_name: str = "tensor",
        scatter_dimension: int | None = -2,
        use_bias: bool = False,
        implementation: Implementation = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        bias_init: nnx.Initializer = _BIAS_INIT,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        self.in_features = layer_checks.sizes("in_features", in_features)
        (self.out_features,) = layer_checks.sizes("out_features", (out_features,))
        self.axis_name, self.mesh = axis_name, mesh
        self.scatter_dimension = scatter_dimension
        self.implementation = check_implementation(implementation)
        self.dtype = dtype
        if devices := known_axis_size(axis_name, mesh):
            layer_checks.features("in_features", self.in_features, axis_name, devices)
        rows = math.prod(self.in_features)
        names = (axis_name, *[None] * len(self.in_features))
        kernel = kernel_init(rngs.params(), (rows, out_features), param_dtype)
        self.kernel = _param(kernel.reshape(*self.in_features, out_features), names)
        if use_bias:
            self.bias = _param(bias_init(rngs.params(), (out_features,), param_dtype), (None,))
        else:
            self.bias = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., S, *in_features] -> [..., S, out_features]; for local shapes see the class."""
        x, kernel, bias = promote_dtype(
            (x, self.kernel[...], None if self.bias is None else self.bias[...]), dtype=self.dtype
        )
        return row_parallel(
            current_context(self.axis_name, self.mesh),
            x,
            kernel,
            bias,
            (*self.in_features, self.out_features),
            scatter_dimension=self.scatter_dimension,
            implementation=self.implementation,
        )


def shared_gather(x: jax.Array, layers: Sequence[ColumnParallelLinear]) -> tuple[jax.Array, ...]:
    """Calls several column-parallel layers on one x, which is gathered once for all of them.

    Args:
      x: global [..., S, in_features] or local [..., s, in_features].
      layers: at least one layer. All have the same axis_name, gather_dimension, implementation,
        dtype and mesh.

    Returns:
      The results of the layers, in their order.

    Raises:
      ValueError: if there is no layer or they differ in one of these; and as the layers raise.
    """
    if not layers:
        raise ValueError(f"layers={layers!r}: expected at least one ColumnParallelLinear")
    first = layers[0]
    for name in ("axis_name", "gather_dimension", "implementation", "dtype", "mesh"):
        values = [getattr(layer, name) for layer in layers]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"layers: they have {name} {', '.join(map(repr, values))}; one gather serves layers"
                f" of one {name}: construct them alike or call them one by one"
            )
    kernels = [layer.kernel[...] for layer in layers]
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    dtype = canonicalize_dtype(x, *kernels, *biases, dtype=first.dtype)
    return column_parallel(
        current_context(first.axis_name, first.mesh),
        jnp.asarray(x, dtype),
        [kernel.astype(dtype) for kernel in kernels],
        [None if bias is None else bias.astype(dtype) for bias in biases],
        [(layer.in_features, *layer.out_features) for layer in layers],
        gather_dimension=first.gather_dimension,
        implementation=first.implementation,
    )


def _param(value: jax.Array, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
    """A parameter with a partition spec. It is not placed yet, as there may be no mesh."""
    return nnx.Param(value, out_sharding=names, eager_sharding=False)
