"""Flax nnx modules: linear layers cut by columns or by rows over a mesh axis.

Legend of global shapes: S the dimension that is sharded between layers (the sequence of a
transformer), D devices on the axis, s = S/D. Called inside a `shard_map` over the axis, parameters
and activations are local shards. Called elsewhere they are global, and the layer enters `shard_map`
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

from collective_matmul.checks import implementation as check_implementation
from collective_matmul.layers import layer_checks
from collective_matmul.layers.functions import column_parallel, row_parallel
from collective_matmul.layers.sharding_context import current_context, known_axis_size

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class LinearOptions(TypedDict, total=False):
    """What modules built of linear layers hand on to them: see `ColumnParallelLinear`."""

    use_bias: bool
    implementation: str | None
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    rngs: Required[nnx.Rngs]


class ColumnParallelLinear(nnx.Module):
    """A linear layer whose output features are spread over a mesh axis: gathers x, multiplies.

    ``layer(x)`` equals ``x @ kernel + bias``. Shapes of the call::

        global  x [..., S, in_features] -> [..., S, *out_features], sharded in out_features[0]
        local   x [..., s, in_features] -> [..., S, out_features[0]/D, *out_features[1:]]

    The parameters, with what `nnx.get_partition_spec` gives for them::

        kernel  [in_features, *out_features]    P(None, axis_name, ...)
        bias    [*out_features]                 P(axis_name, ...)

    Args:
      in_features: size of x's last dimension.
      out_features: one size, or several, of which the axis must divide the first.
      axis_name: the mesh axis of size D.
      gather_dimension: the dimension of x that is sharded between layers; negative numbers count
        from the features. None: x is whole on every device and nothing is gathered.
      use_bias: whether a bias is added.
      implementation: None chooses per shape; or "xla", "ring", "ring_two_way", "ring_direct".
      dtype: of the computation and of what is communicated; None promotes x and the parameters.
      param_dtype: of the parameters.
      kernel_init: called with the shape [in_features, product of out_features].
      bias_init: called with the shape [product of out_features].
      mesh: of global arrays; None means that of `jax.set_mesh`.
      rngs: for the initial parameters.

    Raises:
      ValueError: from the constructor if the axis does not divide the output features and its size
        is known; from the call for sizes that do not fit and where no mesh is known. Before
        anything is compiled.
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
        implementation: str | None = None,
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
        self.implementation = implementation
        self.dtype = dtype
        check_implementation(implementation)
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
        """[..., S, in_features] -> [..., S, *out_features]; local: see the class."""
        return shared_gather(x, [self])[0]


class RowParallelLinear(nnx.Module):
    """A linear layer whose input features are spread over a mesh axis: multiplies, scatters sums.

    ``layer(x)`` equals ``x @ kernel + bias``, contracted over all input features. Shapes of the
    call::

        global  x [..., S, *in_features] -> [..., S, out_features], sharded in S
        local   x [..., S, in_features[0]/D, *in_features[1:]] -> [..., s, out_features]

    The parameters, with what `nnx.get_partition_spec` gives for them::

        kernel  [*in_features, out_features]    P(axis_name, ...)
        bias    [out_features]                  P(None), added once, after the sum

    Args:
      in_features: one size, or several, of which the axis must divide the first.
      out_features: size of the result's last dimension.
      axis_name: the mesh axis of size D.
      scatter_dimension: the dimension of the result to shard; negative numbers count from the
        features. None: the sum is whole on every device.
      use_bias: whether a bias is added.
      implementation: None chooses per shape; or "xla", "ring", "ring_two_way", "ring_direct".
      dtype: of the computation and of what is communicated; None promotes x and the parameters.
      param_dtype: of the parameters.
      kernel_init: called with the shape [product of in_features, out_features].
      bias_init: called with the shape [out_features].
      mesh: of global arrays; None means that of `jax.set_mesh`.
      rngs: for the initial parameters.

    Raises:
      ValueError: from the constructor if the axis does not divide the input features and its size
        is known; from the call for sizes that do not fit and where no mesh is known. Before
        anything is compiled.
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
        implementation: str | None = None,
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
        self.implementation = implementation
        self.dtype = dtype
        check_implementation(implementation)
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
        """[..., S, *in_features] -> [..., S, out_features]; local: see the class."""
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
    """The results of several layers on one x, which is gathered once for all of them.

    Args:
      x: global [..., S, in_features] or local [..., s, in_features].
      layers: at least one; alike in axis_name, gather_dimension, implementation, dtype and mesh.

    Returns:
      What each layer would return, in their order.

    Raises:
      ValueError: if there is no layer, or they differ in one of those; and what the layers raise.
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
    """A parameter that says how it is to be sharded, and is not: there may be no mesh yet."""
    return nnx.Param(value, out_sharding=names, eager_sharding=False)
