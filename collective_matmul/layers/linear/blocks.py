"""The two halves of a transformer block that share a gather, built from the linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear.linear import (
    ColumnParallelLinear,
    LayerOptions,
    RowParallelLinear,
    shared_gather,
)
from collective_matmul.layers.linear.lora import Lora
from collective_matmul.layers.sharding_context import known_axis_size

#: An adapter for all layers of a block, or by the name of a layer.
Adapters = Lora | Mapping[str, Lora | None] | None


def _of(adapters: Adapters, name: str) -> Lora | None:
    """The adapter of one layer."""
    return adapters.get(name) if isinstance(adapters, Mapping) else adapters


class GatedFeedForward(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; one gather feeds gate and up.

    Shazeer, "GLU Variants Improve Transformer", 2020. Shapes of the call, with S sharded::

        global  x [..., S, features] -> [..., S, features]
        local   x [..., s, features] -> [..., s, features]

    Args:
      features: size of the last dimension of x and of the result.
      hidden_features: output features of gate and up; divisible by the size of the axis.
      activation: elementwise function.
      axis_name: the mesh axis, of size D.
      gather_dimension: for gate and up; see `ColumnParallelLinear`.
      scatter_dimension: for down; see `RowParallelLinear`.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      lora: the adapter of all three layers, or one for each of their names; None for none. If one
        layer has an adapter, the others are frozen too: give them ``frozen=True``.
      **options: passed on to all three layers: use_bias, implementation, weight_axis_name,
        data_axis_name, dtype, param_dtype, kernel_init, bias_init and rngs, as for
        `ColumnParallelLinear`. Gate and up have weight_dimension too; that of down is 1, so with 0
        all are sharded over `features`.

    Raises:
      ValueError: as the layers raise.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        axis_name: str = "tensor",
        gather_dimension: int | None = -2,
        scatter_dimension: int | None = -2,
        mesh: Mesh | AbstractMesh | None = None,
        lora: Adapters = None,
        **options: Unpack[LayerOptions],
    ):
        if devices := known_axis_size(axis_name, mesh):
            layer_checks.features("hidden_features", hidden_features, axis_name, devices)

        def column(name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                features,
                hidden_features,
                axis_name=axis_name,
                gather_dimension=gather_dimension,
                mesh=mesh,
                lora=_of(lora, name),
                **options,
            )

        self.activation = activation
        self.gate, self.up = column("gate"), column("up")
        options.pop("weight_dimension", None)
        self.down = RowParallelLinear(
            hidden_features,
            features,
            axis_name=axis_name,
            scatter_dimension=scatter_dimension,
            mesh=mesh,
            lora=_of(lora, "down"),
            **options,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., S, features] -> [..., S, features]; for local shapes see the class."""
        gate, up = shared_gather(x, [self.gate, self.up])
        # A backward keeps gate and up, and computes again what lies between them and the result.
        return self.down(jax.checkpoint(self._gated)(gate, up))

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate) * up


class AttentionProjection(nnx.Module):
    """Queries, keys and values with heads sharded over the axis; one gather feeds all.

    Fewer key and value heads than query heads is grouped-query attention: Ainslie et al., "GQA",
    2023. Shapes of the call::

        global  x [..., S, features] -> query [..., S, num_heads, head_dim],
                                        key, value [..., S, num_key_value_heads, head_dim]
        local   x [..., s, features] -> query [..., S, num_heads/D, head_dim],
                                        key, value [..., S, num_key_value_heads/D, head_dim]

    With fewer key and value heads than devices, each head is computed by several devices, from
    parameters that are whole on all. Then key and value have D heads globally and one locally. The
    output projection is ``RowParallelLinear((num_heads, head_dim), features)``.

    Args:
      features: size of the last dimension of x.
      num_heads: number of query heads; divisible by the size of the axis.
      num_key_value_heads: number of key heads and of value heads; divisible by the size of the axis
        or a divisor of it, and a divisor of num_heads.
      head_dim: features of one head.
      axis_name: the mesh axis, of size D.
      gather_dimension: for all three layers; see `ColumnParallelLinear`.
      key_value_copies: number of devices that compute each head of keys and values; None: D over
        their number if the size of the axis is known and is larger, else 1.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      lora: the adapter of all three layers, or one for each of their names; None for none. If one
        layer has an adapter, the others are frozen too: give them ``frozen=True``.
      **options: passed on to all three layers: use_bias, implementation, data_axis_name, dtype,
        param_dtype, kernel_init, bias_init and rngs, as for `ColumnParallelLinear`.

    Raises:
      ValueError: if num_key_value_heads does not divide num_heads; and as the layers raise.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        axis_name: str = "tensor",
        gather_dimension: int | None = -2,
        key_value_copies: int | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        lora: Adapters = None,
        **options: Unpack[LayerOptions],
    ):
        for name, value in (
            ("num_heads", num_heads),
            ("num_key_value_heads", num_key_value_heads),
        ):
            layer_checks.sizes(name, (value,))
        if num_heads % num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={num_key_value_heads}: does not divide"
                f" num_heads={num_heads}, whose queries share keys in equal groups"
            )
        devices = known_axis_size(axis_name, mesh) or 1
        if key_value_copies is None:
            key_value_copies = max(devices // num_key_value_heads, 1)
        if devices > 1:
            layer_checks.features("num_heads", num_heads, axis_name, devices)
            computed = num_key_value_heads * key_value_copies
            layer_checks.features("num_key_value_heads", computed, axis_name, devices)

        def column(name: str, heads: int, copies: int = 1) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                features,
                (heads, head_dim),
                axis_name=axis_name,
                gather_dimension=gather_dimension,
                copies=copies,
                mesh=mesh,
                lora=_of(lora, name),
                **options,
            )

        self.query = column("query", num_heads)
        self.key = column("key", num_key_value_heads, key_value_copies)
        self.value = column("value", num_key_value_heads, key_value_copies)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., S, features] -> query, key and value; for their shapes see the class."""
        query, key, value = shared_gather(x, [self.query, self.key, self.value])
        return query, key, value
