"""`ExpertMLP`: a router and its experts, as a Flax nnx module.

Legend: h features of a token, E experts, k choices of a token, f hidden features of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from collective_matmul.layers import layer_checks
from collective_matmul.layers.experts.expert_axes import ExpertAxes
from collective_matmul.layers.experts.expert_functions import (
    ExpertOptions,
    expert_context,
    routed_experts,
)
from collective_matmul.layers.experts.router import Router, RouterOptions
from collective_matmul.layers.experts.router_statistics import RouterStatistics
from collective_matmul.layers.linear.blocks import GatedFeedForward
from collective_matmul.layers.sharding_context import known_axis_size
from collective_matmul.operands.quantized import typed
from collective_matmul.ops.experts.activations import ACTIVATIONS
from collective_matmul.ops.experts.biases import ExpertBiases
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.matmul.checks import RecipeName

_KERNEL_INIT = nnx.initializers.lecun_normal()


class SharedExpert(nnx.Module):
    """A gated feed-forward that all tokens visit; it may be weighted by ``sigmoid(x @ gate)``.

    The parameters are those of `feed_forward`, a `GatedFeedForward`, and::

        gate    [h, 1]    P(None, None), if it is gated

    Args:
      in_features: h.
      hidden_features: those of the feed-forward.
      gated: whether the result is multiplied with the sigmoid.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the parameters.
      rngs: random keys.
      **options: further options of `GatedFeedForward`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gated: bool,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.dtype = dtype
        initial: Any = dict(param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        self.feed_forward = GatedFeedForward(
            in_features, hidden_features, dtype=dtype, **initial, **options
        )
        self.gate: nnx.Param[jax.Array] | None = nnx.data(None)
        if gated:
            gate = kernel_init(rngs.params(), (in_features, 1), param_dtype)
            self.gate = nnx.Param(gate, out_sharding=(None, None), eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [..., h]."""
        y = self.feed_forward(x)
        if self.gate is None:
            return y
        gate = self.gate[...]
        dtype = canonicalize_dtype(x, gate, dtype=self.dtype)
        return y * jax.nn.sigmoid(jnp.asarray(x, dtype) @ gate.astype(dtype)).astype(y.dtype)


class ExpertMLP(nnx.Module):
    """A mixture of experts: a router sends each token to k of E gated feed-forwards.

    The result is the weighted sum of a token's experts, plus the shared expert's if there is one.
    No token is dropped. `collective_matmul.expert_mlp` exchanges the tokens of the devices along
    `axis_name` and `hidden_axis_name` while experts work. Shapes of the call::

        x           global [..., h], or local: this device's tokens
        mask        of x without its last dimension, or None
        result      y, of x's shape, and the router's statistics

    The statistics are sums over the tokens of the call: of all tokens if arrays are global, of this
    device's inside a `shard_map`, where `RouterStatistics.sum_over_devices` adds them up. Nothing
    in the layer waits for them. `load_balancing_loss` and `router_z_loss` make losses of them.

    The parameters, and what `nnx.get_partition_spec` returns for them::

        router.kernel    [h, E]       P(None, None)
        w_gate, w_up     [E, h, f]    P(axis_name, weight_axis_name, hidden_axis_name)
        w_down           [E, f, h]    P(axis_name, (hidden_axis_name, weight_axis_name), None)
        b_gate, b_up     [E, f]       P(axis_name, hidden_axis_name), with use_bias=True
        b_down           [E, h]       P(axis_name, None), with use_bias=True
        shared           those of a `SharedExpert`, if there are shared features
        router.bias      [E]          P(None), a `BalancingBias`, with selection_bias=True
        router.logit_bias  [E]        P(None), with logit_bias=True

    Experts may be divided over the tensor axis, over the axis of fully sharded data parallelism, or
    over both while attention uses the tensor axis alone. If every device along an axis has the same
    tokens, as in decoding, nothing travels along it: each device applies its own experts, and the
    results are added. Inside a `shard_map` the type of x tells so, if ``check_vma=True``.

    Args:
      in_features: h.
      hidden_features: f; divisible by the size of `hidden_axis_name`.
      experts: E; divisible by the number of devices along `axis_name`.
      choices: k.
      shared_features: hidden features of an expert that all tokens visit; 0 for none.
      shared_gate: whether the shared expert's result is multiplied with the sigmoid of a product of
        x with a vector, as in Qwen2-MoE.
      shared_axis_name: the mesh axis of the shared expert.
      shared_weight_axis_name: its weight_axis_name.
      activation: "silu", "gelu" (by tanh), "relu" or "gpt_oss"; see `collective_matmul.expert_mlp`.
        A shared expert does not have the last.
      use_bias: whether experts have biases; they begin as 0. The shared expert has none.
      axis_name: the mesh axis that experts are divided over, or several in the order in which
        experts are numbered, or ().
      hidden_axis_name: a mesh axis that divides the hidden features, or None.
      weight_axis_name: a further mesh axis that shards dimension 1 of the weights, as in fully
        sharded data parallelism; or None. Inside a `shard_map` over it, the op gathers them in
        `dtype`; elsewhere the compiler does.
      token_dimension: for global arrays, the dimension of x that each axis of `axis_name` and then
        `hidden_axis_name` shards: one for all, or one for each. An axis that does not divide its
        dimension leaves it whole.
      data_axis_name: for global arrays, further mesh axes that shard dimension 0 of x. The compiler
        does not divide the work of experts over axes that are not named.
      dtype: dtype of the experts' computation and of the communicated arrays; None promotes x and
        the weights. The router always computes in float32.
      param_dtype: dtype of the parameters.
      kernel_init: initializer, called with the shape of one expert's matrix, and with those of the
        router's and the shared expert's.
      recompute_hidden: see `collective_matmul.expert_mlp`.
      fp8: None, or the recipe by which operands of the experts and of the shared expert are
        quantized, or the name of a registered format. Routers and the gate of the shared expert
        compute without it.
      implementation: likewise.
      grouped_implementation: likewise.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      rngs: random keys for the initial parameters.
      **router: options of the `Router`.

    Raises:
      ValueError: by the constructor, for options that do not fit each other or axes of known size;
        by the call, if shapes do not fit or no mesh is known. Nothing is compiled before.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        experts: int,
        choices: int,
        *,
        shared_features: int = 0,
        shared_gate: bool = False,
        shared_axis_name: str = "tensor",
        shared_weight_axis_name: str | None = None,
        activation: str = "silu",
        use_bias: bool = False,
        axis_name: str | tuple[str, ...] = "tensor",
        hidden_axis_name: str | None = None,
        weight_axis_name: str | None = None,
        token_dimension: int | Sequence[int] = -2,
        data_axis_name: str | tuple[str, ...] = (),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        recompute_hidden: bool = False,
        fp8: RecipeName | None = None,
        implementation: str | Sequence[str] | None = None,
        grouped_implementation: str | Sequence[str] | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        rngs: nnx.Rngs,
        **router: Unpack[RouterOptions],
    ):
        self.sizes = experts, in_features, hidden_features
        self.dtype, self.mesh = dtype, mesh
        self.axes = ExpertAxes.of(
            axis_name, hidden_axis_name, weight_axis_name, token_dimension, data_axis_name
        )
        self.options = ExpertOptions.of(
            activation, recompute_hidden, implementation, grouped_implementation, fp8
        )
        self._check_sizes()
        initial: Any = dict(param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        self.router = Router(in_features, experts, choices, **initial, **router)
        ws = _initial_weights(self.sizes, self.axes.weight_specs, **initial)
        self.w_gate, self.w_up, self.w_down = ws
        own = _initial_biases(self.sizes, self.axes.bias_specs, param_dtype if use_bias else None)
        self.b_gate, self.b_up, self.b_down = own
        layer_checks.shared_expert(shared_features, shared_gate, activation)
        self.shared: SharedExpert | None = nnx.data(None)
        if shared_features:
            initial |= dict(axis_name=shared_axis_name, weight_axis_name=shared_weight_axis_name)
            initial |= dict(activation=ACTIVATIONS[activation], dtype=dtype, fp8=fp8, mesh=mesh)
            self.shared = SharedExpert(in_features, shared_features, gated=shared_gate, **initial)

    def _check_sizes(self) -> None:
        """Checks the sizes, against those of the axes that are known.

        Raises:
          ValueError: if they do not fit.
        """
        for name, size in zip(
            ("experts", "in_features", "hidden_features"), self.sizes, strict=True
        ):
            layer_checks.sizes(name, size)
        axes, hidden_axis = self.axes.expert_axes, self.axes.hidden_axis
        sizes = [known_axis_size(axis, self.mesh) for axis in axes]
        if axes and None not in sizes:
            devices = math.prod(size or 1 for size in sizes)
            layer_checks.features("experts", self.sizes[0], " and ".join(axes), devices)
        if hidden_axis and (devices := known_axis_size(hidden_axis, self.mesh)):
            layer_checks.features("hidden_features", self.sizes[2], hidden_axis, devices)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStatistics]:
        """Applies each token's experts; for shapes see the class.

        Args:
          x: [..., h].
          mask: 0 or False for tokens that the statistics leave out, such as padding; or None. The
            experts compute these tokens too.
        """
        ws = ExpertWeights(*(w.get_value() for w in (self.w_gate, self.w_up, self.w_down)))
        dtype = canonicalize_dtype(x, *map(typed, ws), dtype=self.dtype)
        biases = ExpertBiases(
            *(None if b is None else b[...] for b in (self.b_gate, self.b_up, self.b_down))
        )
        context = expert_context(self.axes, self.mesh, (x, ws, biases))
        self.axes.check_weights(context, ws, self.sizes)
        y, statistics = routed_experts(
            context,
            self.axes,
            self.router,
            self.options,
            (x, mask),
            self.router.parameters,
            (ws, biases),
            dtype,
        )
        if self.shared is not None:
            y += self.shared(x).astype(dtype)
        return y, statistics


def _initial_weights(
    shape: tuple[int, int, int],
    specs: ExpertWeights,
    *,
    param_dtype: DTypeLike,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
) -> ExpertWeights:
    """A matrix for each expert. Initializers of three dimensions would count experts as inputs."""
    experts, inputs, hidden = shape

    def matrices(rows: int, columns: int, spec: P) -> nnx.Param[jax.Array]:
        keys = jax.random.split(rngs.params(), experts)
        value = jax.vmap(lambda key: kernel_init(key, (rows, columns), param_dtype))(keys)
        return nnx.Param(value, out_sharding=tuple(spec), eager_sharding=False)

    gate, up = (matrices(inputs, hidden, spec) for spec in specs[:2])
    return ExpertWeights(gate, up, matrices(hidden, inputs, specs.down))


def _initial_biases(
    shape: tuple[int, int, int], specs: ExpertBiases, dtype: DTypeLike | None
) -> list[Any]:
    """Zeros for each expert; without a dtype there are none."""
    if dtype is None:
        return [nnx.data(None)] * len(specs)
    experts, inputs, hidden = shape
    return [
        nnx.Param(
            jnp.zeros((experts, features), dtype), out_sharding=tuple(spec), eager_sharding=False
        )
        for features, spec in zip((hidden, hidden, inputs), specs, strict=True)
    ]
