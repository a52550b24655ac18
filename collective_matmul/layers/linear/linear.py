"""Flax nnx modules: linear layers that are column- or row-parallel over a mesh axis.

Legend of global shapes: S is the dimension that is sharded between layers (the sequence of a
transformer), D is the size of the axis, and s = S/D. Inside a `shard_map` over the axis, parameters
and activations are local shards. Elsewhere they are global, and the layer enters `shard_map`
itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.sharding import AbstractMesh, Mesh, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear.functions import (
    KernelShape,
    column_parallel,
    own_columns,
    row_parallel,
)
from collective_matmul.layers.linear.lora import Adapter, Lora
from collective_matmul.layers.linear.shared_calls import SharedCalls, shared_calls_of, sharing
from collective_matmul.layers.sharding_context import (
    ShardingContext,
    SpecEntries,
    WeightSharding,
    current_context,
    kernel_spec,
    known_axis_size,
    known_weight_devices,
)
from collective_matmul.operands.quantized import typed
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import Implementation, RecipeName

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()
_LORA_INIT = nnx.initializers.he_uniform()

#: What layers that share a gather have in common.
_ALIKE = (
    "axis_name",
    "gather_dimension",
    "implementation",
    "fp8",
    "weight_sharding",
    "data_axis_name",
    "dtype",
    "mesh",
    "frozen",
)


class LayerOptions(TypedDict, total=False):
    """Options that modules built from linear layers pass on: see `ColumnParallelLinear`."""

    use_bias: bool
    implementation: Implementation
    fp8: RecipeName | None
    weight_axis_name: str | None
    weight_dimension: Literal[0, 1]
    data_axis_name: str | tuple[str, ...]
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    frozen: bool
    rngs: Required[nnx.Rngs]


class LinearOptions(LayerOptions, total=False):
    """Options of one linear layer."""

    lora: Lora | None


class _ParallelLinear(nnx.Module):
    """The parameters and options of both linear layers.

    Args:
      in_features: one size or several.
      out_features: one size or several.
      sharded_features: the name of the argument whose first size the axis divides; None: neither.
      axis_name: the mesh axis.
      mesh: mesh of the global arrays, or None.
      **options: as for `ColumnParallelLinear`.
    """

    bias: nnx.Param[jax.Array] | None
    #: Modules that were made without these have none of them.
    frozen: bool = False
    lora: Lora | None = None
    data_axis_name: tuple[str, ...] = ()

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        sharded_features: Literal["in_features", "out_features"] | None,
        axis_name: str,
        mesh: Mesh | AbstractMesh | None,
        *,
        use_bias: bool = False,
        implementation: Implementation = None,
        fp8: RecipeName | None = None,
        weight_axis_name: str | None = None,
        weight_dimension: Literal[0, 1] = 1,
        data_axis_name: str | tuple[str, ...] = (),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        bias_init: nnx.Initializer = _BIAS_INIT,
        frozen: bool = False,
        lora: Lora | None = None,
        rngs: nnx.Rngs,
    ):
        inputs = layer_checks.sizes("in_features", in_features)
        outputs = layer_checks.sizes("out_features", out_features)
        self.in_features = in_features if isinstance(in_features, int) else inputs
        self.out_features = out_features if isinstance(out_features, int) else outputs
        self.axis_name, self.mesh, self.weight_axis_name = axis_name, mesh, weight_axis_name
        self.implementation = checks.implementation(implementation)
        self.fp8: RecipeName | None = checks.fp8(fp8)
        self.dtype, self.param_dtype = dtype, param_dtype
        self.use_bias, self.frozen = use_bias, frozen
        self.weight_dimension: Literal[0, 1] = weight_dimension
        place = {"in_features": 0, "out_features": len(inputs), None: None}[sharded_features]
        counts = len(inputs), len(outputs)
        over_axis = kernel_spec(counts, place, axis_name, None)
        self.data_axis_name = layer_checks.data_axes(data_axis_name, axis_name)
        self._check_features(sharded_features)
        if weight_axis_name is not None:
            dimensions = "0 for the first of in_features, or 1 for the first of out_features"
            checks.weight_sharding(weight_axis_name, weight_dimension, axis_name, dimensions)
        flat = math.prod(inputs), math.prod(outputs)
        kernel = kernel_init(rngs.params(), flat, param_dtype).reshape(*inputs, *outputs)
        spec = kernel_spec(counts, place, axis_name, self.weight_sharding)
        self.kernel, self.bias = _param(kernel, spec), nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), flat[1:], param_dtype).reshape(outputs)
            self.bias = _param(bias, over_axis[len(inputs) :])
        self._add_adapter(lora, flat, (over_axis[0], over_axis[len(inputs)]), rngs)

    def _check_features(self, sharded: Literal["in_features", "out_features"] | None) -> None:
        """Raises ValueError if the axes are known and do not divide the kernel."""
        devices = known_axis_size(self.axis_name, self.mesh, self.data_axis_name)
        side = {"in_features": 0, "out_features": 1}.get(sharded or "")
        if devices and sharded is not None and side is not None:
            layer_checks.features(sharded, self.kernel_shape[side], self.axis_name, devices)
        if not devices or (second := self.weight_axis_name) is None:
            return
        size = self.kernel_shape[self.weight_dimension][0]
        pieces = devices if side == self.weight_dimension else 1
        if (count := known_weight_devices(second, self.axis_name, self.mesh)) is not None:
            layer_checks.weight_features(size, second, count, pieces)

    def _add_adapter(
        self,
        lora: Lora | None,
        sizes: tuple[int, int],
        spec: SpecEntries,
        rngs: nnx.Rngs,
    ) -> None:
        """Adds A and B, which are sharded as the kernel is over `axis_name`: by `spec`."""
        if lora is None:
            return
        self.lora, self.frozen = lora, True
        shapes = (sizes[0], lora.rank), (lora.rank, sizes[1])
        a = _LORA_INIT(rngs.params(), shapes[0], self.param_dtype)
        b = jnp.zeros(shapes[1], self.param_dtype)
        self.lora_a = _param(a, (spec[0], None), nnx.LoRAParam)
        self.lora_b = _param(b, (None, spec[1]), nnx.LoRAParam)
        if lora.dropout:
            # Other sources of keys are of initial parameters alone: a model sets those of dropout.
            own = rngs if isinstance(rngs, nnx.Rngs) else None
            self.lora_dropout = nnx.Dropout(lora.dropout, rngs=own)

    def _adapter(self) -> Adapter | None:
        """The adapter of a call, with B as [r, *out_features]; None without one."""
        if self.lora is None:
            return None
        key = None
        if self.lora.dropout and not self.lora_dropout.deterministic:
            rngs: Any = self.lora_dropout.rngs
            if rngs is None:
                raise ValueError(
                    f"lora.dropout={self.lora.dropout}: the layer was made without nnx.Rngs and"
                    " has no random keys; set lora_dropout.rngs to a function that returns one, or"
                    " call model.eval()"
                )
            key = rngs()
        return self.adapter_of(self.lora_a[...], self.lora_b[...], self.lora, key)

    def adapter_of(self, a: jax.Array, b: jax.Array, lora: Lora, key: Any = None) -> Adapter:
        """The adapter of a call with parameters A and B [r, prod(N)] of this layer's sizes."""
        columns = b.shape[1] // math.prod(self.kernel_shape[1][1:])
        return Adapter(a, b.reshape(-1, columns, *self.kernel_shape[1][1:]), key, lora)

    def context_of(self, arrays: Any) -> ShardingContext:
        """The context of a call with these arrays."""
        return current_context(self.axis_name, self.mesh, arrays, data_axes=self.data_axis_name)

    @property
    def kernel_shape(self) -> KernelShape:
        """The global shape of the kernel, as its input features and its output features."""
        sizes = layer_checks.sizes
        return sizes("in_features", self.in_features), sizes("out_features", self.out_features)

    @property
    def weight_sharding(self) -> WeightSharding | None:
        """The second axis of the kernel, and the dimension that it shards; None without one."""
        if self.weight_axis_name is None:
            return None
        return self.weight_axis_name, self.weight_dimension


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer with output features sharded over a mesh axis. It gathers x, then multiplies.

    ``layer(x)`` equals ``x @ kernel + bias``, contracted over all input features. Shapes of the
    call, with S divisible by D::

        global  x [..., S, *in_features] -> [..., S, *out_features], sharded in out_features[0]
        local   x [..., s, *in_features] -> [..., S, out_features[0]/D, *out_features[1:]]

    If the axis does not divide S, as in decoding with S = 1, x is whole on every device and is not
    gathered. The parameters, and what `nnx.get_partition_spec` returns for them::

        kernel  [*in_features, *out_features]    P(None, ..., axis_name, ...)
        bias    [*out_features]                  P(axis_name, ...)

    Args:
      in_features: sizes of x's last dimensions: one size or several.
      out_features: one size or several; the first is divisible by the size of the axis.
      axis_name: the mesh axis, of size D.
      gather_dimension: the dimension of x that is sharded between layers; negative numbers count
        from the features, as if they were one dimension. None: x is the same on every device and
        is not gathered.
      heads: number of heads that out_features are, for heads of keys and values that may be fewer
        than D: out_features[0] of several; of a single size, heads follow one another. None: D
        divides out_features. If they are fewer, D / heads devices compute each: parameters are
        whole on every device, and the result has D heads, sharded.
      copies: that number of devices, if D is not known when the layer is constructed.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      **options: the rest, by name:

        * use_bias (default False): whether to add a bias.
        * implementation: which backends execute the matmuls, as the ops take it; None chooses for
          each shape. See `collective_matmul.ops.matmul.backends`.
        * fp8: None, or the recipe by which operands are quantized to 8 bits, as the ops take it. An
          x that is not gathered is multiplied as it is.
        * weight_axis_name: a second mesh axis, which shards the kernel too, as in fully sharded
          data parallelism; or None. Where it shards the batch too, by `data_axis_name` or inside a
          `shard_map` over both axes, the ops gather the kernel in their own loop, in `dtype`;
          elsewhere the compiler does.
        * weight_dimension (default 1): what it shards: 0 for the first of in_features, 1 for the
          first of out_features.
        * data_axis_name (default ()): a mesh axis that shards dimension 0 of global arrays, the
          batch, or several. Types of arrays do not say what Auto axes shard: without it, backends
          are chosen for the whole batch, and kernels that no Auto axis may divide are left out.
        * dtype: dtype of the computation and of the communicated arrays; None promotes x and the
          parameters.
        * param_dtype (default float32): dtype of the parameters.
        * kernel_init: initializer, called with the shape [product of in_features, product of
          out_features].
        * bias_init: initializer, called with the shape [product of out_features].
        * frozen (default False): whether the kernel has no gradient: none is computed, and nothing
          is gathered or kept for one.
        * lora: a `Lora`, whose parameters are ``lora_a`` [product of in_features, rank] and
          ``lora_b`` [rank, product of out_features], both `nnx.LoRAParam`; or None. The kernel is
          frozen then. What the adapter makes of x travels in the collective of the layer.
        * rngs (required): random keys for the initial parameters.

    Raises:
      ValueError: by the constructor, if the axis has a known size that does not divide the output
        features; by the call, if sizes do not fit or no mesh is known. Nothing is compiled before.
    """

    copies: int = 1

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis_name: str = "tensor",
        gather_dimension: int | None = -2,
        heads: int | None = None,
        copies: int = 1,
        mesh: Mesh | AbstractMesh | None = None,
        **options: Unpack[LinearOptions],
    ):
        outputs = layer_checks.sizes("out_features", out_features)
        devices = known_axis_size(axis_name, mesh)
        copies = layer_checks.copies(copies, heads, outputs, axis_name, devices)
        layer_checks.whole_kernels(copies, options.get("weight_axis_name"))
        self.gather_dimension, self.copies = gather_dimension, copies
        sharded = "out_features" if copies == 1 else None
        super().__init__(in_features, out_features, sharded, axis_name, mesh, **options)

    @property
    def _computed_shape(self) -> KernelShape:
        """The global shape of the kernel as if each device had its own columns."""
        inputs, (first, *others) = self.kernel_shape
        return inputs, (first * self.copies, *others)

    def __call__(
        self, x: jax.Array | SharedProjections, out_sharding: Sharding | P | None = None
    ) -> jax.Array:
        """[..., S, *in_features] -> [..., S, *out_features]; for local shapes see the class.

        Args:
          x: the input.
          out_sharding: as Flax's linear layers take it: the sharding of the global result; None
            shards it over the axis.
        """
        if isinstance(x, SharedProjections):
            y = x.results[id(self)]
            return self.context_of(y).reshard(y, out_sharding)
        return self.with_adapter(x, self._adapter(), out_sharding)

    def with_adapter(
        self, x: jax.Array, adapter: Adapter | None, out_sharding: Sharding | P | None = None
    ) -> jax.Array:
        """A call of the layer with an adapter that is not its own."""
        if (shared := shared_calls_of(self)) is not None:
            calls, name = shared
            y = calls.result(name, x)
        else:
            (y,) = _gathered_once(x, [self], [adapter])
        return self.context_of(y).reshard(y, out_sharding)


class RowParallelLinear(_ParallelLinear):
    """A linear layer with input features sharded over a mesh axis. It multiplies, then scatters.

    ``layer(x)`` equals ``x @ kernel + bias``, contracted over all input features. Shapes of the
    call, with S divisible by D::

        global  x [..., S, *in_features] -> [..., S, *out_features], sharded in S
        local   x [..., S, in_features[0]/D, *in_features[1:]] -> [..., s, *out_features]

    If the axis does not divide S, as in decoding with S = 1, the sum is not scattered and is the
    same on every device. The parameters, and what `nnx.get_partition_spec` returns for them::

        kernel  [*in_features, *out_features]    P(axis_name, ...)
        bias    [*out_features]                  P(None, ...), added once, after the sum

    Args:
      in_features: one size or several; the first is divisible by the size of the axis.
      out_features: sizes of the result's last dimensions: one size or several.
      axis_name: the mesh axis, of size D.
      scatter_dimension: the dimension of the result to shard; negative numbers count from the
        features, as if they were one dimension. None: the sum is the same on every device.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      **options: as for `ColumnParallelLinear`.

    Raises:
      ValueError: by the constructor, if the axis has a known size that does not divide the input
        features; by the call, if sizes do not fit or no mesh is known. Nothing is compiled before.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis_name: str = "tensor",
        scatter_dimension: int | None = -2,
        mesh: Mesh | AbstractMesh | None = None,
        **options: Unpack[LinearOptions],
    ):
        self.scatter_dimension = scatter_dimension
        super().__init__(in_features, out_features, "in_features", axis_name, mesh, **options)

    def __call__(self, x: jax.Array, out_sharding: Sharding | P | None = None) -> jax.Array:
        """[..., S, *in_features] -> [..., S, *out_features]; for local shapes see the class.

        Args:
          x: the input.
          out_sharding: as Flax's linear layers take it: the sharding of the global result; None
            shards it in S.
        """
        return self.with_adapter(x, self._adapter(), out_sharding)

    def with_adapter(
        self, x: jax.Array, adapter: Adapter | None, out_sharding: Sharding | P | None = None
    ) -> jax.Array:
        """A call of the layer with an adapter that is not its own."""
        # Not by [...], which is for arrays: it may be a Quantized.
        kernel, bias = self.kernel.get_value(), None if self.bias is None else self.bias[...]
        dtype = canonicalize_dtype(x, typed(kernel), bias, dtype=self.dtype)
        context = self.context_of((x, kernel))
        y = row_parallel(
            context,
            jnp.asarray(x, dtype),
            kernel,
            None if bias is None else bias.astype(dtype),
            self.kernel_shape,
            weight_sharding=self.weight_sharding,
            scatter_dimension=self.scatter_dimension,
            implementation=self.implementation,
            fp8=self.fp8,
            frozen=self.frozen or adapter is not None,
            adapter=adapter,
        )
        return context.reshard(y, out_sharding)


@dataclass(frozen=True)
class SharedProjections:
    """The results of several column-parallel layers for one x, which was gathered once.

    Code that calls the layers one by one, as Flax's attention does, takes it in place of x.

    Args:
      shape: the shape of x.
      results: the result of each layer, by the `id` of an nnx layer or the name of a linen one.
    """

    shape: tuple[int, ...]
    results: Mapping[int | str, jax.Array]

    @classmethod
    def compute(cls, x: jax.Array, layers: Sequence[ColumnParallelLinear]) -> SharedProjections:
        """Calls `shared_gather`."""
        return cls(x.shape, dict(zip(map(id, layers), shared_gather(x, layers), strict=True)))


def shared_gather(x: jax.Array, layers: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Calls several column-parallel layers on one x, which is gathered once for all of them.

    A model may call it before `parallelize`, too: layers that are not collective are called one by
    one.

    Args:
      x: global [..., S, *in_features] or local [..., s, *in_features].
      layers: at least one layer: all `ColumnParallelLinear`, or layers with an adapter around one,
        with the same in_features, axis_name, gather_dimension, implementation, fp8,
        weight_axis_name, weight_dimension, data_axis_name, dtype, mesh and frozen, which layers
        with an adapter are. Or layers of Flax that are not, or not yet, collective. Or linen layers
        of one module, which share the gather inside of a `ParallelModule` whose plan has one
        `Column` for all.

    Returns:
      The results of the layers, in their order.

    Raises:
      ValueError: if there is no layer or they differ in one of these; and as the layers raise.
    """
    if not layers:
        raise ValueError(f"layers={layers!r}: expected at least one ColumnParallelLinear")
    bases = [_base(layer) for layer in layers]
    if not any(isinstance(base, _ParallelLinear) for base in bases):
        return _called_one_by_one(x, layers)
    check_alike(bases)
    adapters = [
        layer._adapter() if layer is base else layer.adapter_of_base()
        for layer, base in zip(layers, bases, strict=True)
    ]
    return _gathered_once(x, bases, adapters)


def _base(layer: Any) -> Any:
    """The linear layer in a layer of nnx with or without an adapter."""
    return layer.base_module if isinstance(layer, nnx.LoRA) else layer


def _called_one_by_one(x: jax.Array, layers: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The results of layers that may share a gather only by what intercepts their calls."""
    if not isinstance(layers[0], linen.Module):
        return tuple(layer(x) for layer in layers)
    if any(layer.parent is not layers[0].parent for layer in layers):
        raise ValueError(
            f"layers: {', '.join(layer.name for layer in layers)} are layers of several modules;"
            " expected layers of one linen module"
        )
    calls = SharedCalls("shared_gather", [layer.name for layer in layers])
    with sharing(calls, layers):
        return tuple(layer(x) for layer in layers)


def check_alike(layers: Sequence[Any]) -> None:
    """Checks that layers can share a gather.

    Raises:
      ValueError: if one is not column-parallel, or they differ in an option.
    """
    for layer in layers:
        if not isinstance(layer, ColumnParallelLinear):
            raise ValueError(
                f"layers: one is a {type(layer).__name__}; those that share a gather are all"
                " column-parallel: give each Column() in the plan, or construct a"
                " ColumnParallelLinear"
            )
    for name in _ALIKE:
        values = [getattr(layer, name) for layer in layers]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"layers: they have {name} {', '.join(map(repr, values))}; one gather serves layers"
                f" of one {name}: construct them alike or call them one by one"
            )


def _gathered_once(
    x: jax.Array, layers: Sequence[ColumnParallelLinear], adapters: list[Adapter | None]
) -> tuple[jax.Array, ...]:
    """`shared_gather` of layers that agree, each with an adapter."""
    first = layers[0]
    kernels: list[Any] = [layer.kernel.get_value() for layer in layers]
    biases: list[Any] = [None if layer.bias is None else layer.bias[...] for layer in layers]
    dtype = canonicalize_dtype(x, *map(typed, kernels), *biases, dtype=first.dtype)
    context = first.context_of((x, kernels))
    contracted = len(first.kernel_shape[0])
    for place, layer in enumerate(layers):
        adapter = adapters[place]
        if adapter is not None:
            b = own_columns(context, adapter.b, 1, layer.copies)
            adapters[place] = dataclasses.replace(adapter, b=b)
        kernels[place] = own_columns(context, kernels[place], contracted, layer.copies)
        biases[place] = own_columns(context, biases[place], 0, layer.copies)
    return column_parallel(
        context,
        jnp.asarray(x, dtype),
        kernels,
        [None if bias is None else bias.astype(dtype) for bias in biases],
        [layer._computed_shape for layer in layers],
        weight_sharding=first.weight_sharding,
        gather_dimension=first.gather_dimension,
        implementation=first.implementation,
        fp8=first.fp8,
        frozen=first.frozen or any(adapter is not None for adapter in adapters),
        adapters=adapters,
    )


def _param(
    value: jax.Array, spec: SpecEntries, kind: type[nnx.Param] = nnx.Param
) -> nnx.Param[jax.Array]:
    """A parameter with a partition spec. It is not placed yet, as there may be no mesh."""
    return kind(value, out_sharding=spec, eager_sharding=False)
