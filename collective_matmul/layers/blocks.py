"""The two halves of a transformer block that share a gather, built on the linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx
from jax.sharding import Mesh

from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear import (
    ColumnParallelLinear,
    LinearOptions,
    RowParallelLinear,
    shared_gather,
)
from collective_matmul.layers.sharding_context import known_axis_size


class GatedFeedForward(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; one gather feeds gate and up.

    Shazeer, "GLU Variants Improve Transformer", 2020. Shapes of the call, S sharded::

        global  x [..., S, features] -> [..., S, features]
        local   x [..., s, features] -> [..., s, features]

    Args:
      features: of x and of the result.
      hidden_features: of gate and up; the axis must divide it.
      activation: elementwise.
      axis_name: the mesh axis of size D.
      gather_dimension: of gate and up: see `ColumnParallelLinear`.
      scatter_dimension: of down: see `RowParallelLinear`.
      mesh: of global arrays; None means that of `jax.set_mesh`.
      **options: of all three layers: use_bias, implementation, dtype, param_dtype, kernel_init,
        bias_init and rngs, as `ColumnParallelLinear` takes them.

    Raises:
      ValueError: what the layers raise.
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
        mesh: Mesh | None = None,
        **options: Unpack[LinearOptions],
    ):
        if devices := known_axis_size(axis_name, mesh):
            layer_checks.features("hidden_features", hidden_features, axis_name, devices)

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                features,
                hidden_features,
                axis_name=axis_name,
                gather_dimension=gather_dimension,
                mesh=mesh,
                **options,
            )

        self.activation = activation
        self.gate, self.up = column(), column()
        self.down = RowParallelLinear(
            hidden_features,
            features,
            axis_name=axis_name,
            scatter_dimension=scatter_dimension,
            mesh=mesh,
            **options,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., S, features] -> [..., S, features]; local: see the class."""
        gate, up = shared_gather(x, [self.gate, self.up])
        return self.down(self.activation(gate) * up)


class AttentionProjection(nnx.Module):
    """Queries, keys and values of attention, heads spread over the axis; one gather feeds all.

    With fewer key and value heads than heads it is grouped-query attention: Ainslie et al., "GQA",
    2023. Shapes of the call::

        global  x [..., S, features] -> query [..., S, num_heads, head_dim],
                                        key, value [..., S, num_key_value_heads, head_dim]
        local   x [..., s, features] -> query [..., S, num_heads/D, head_dim],
                                        key, value [..., S, num_key_value_heads/D, head_dim]

    The way back is ``RowParallelLinear((num_heads, head_dim), features)``.

    Args:
      features: of x.
      num_heads: of queries; the axis must divide it.
      num_key_value_heads: of keys and values; the axis must divide it, and it num_heads.
      head_dim: features of one head.
      axis_name: the mesh axis of size D.
      gather_dimension: of all three layers: see `ColumnParallelLinear`.
      mesh: of global arrays; None means that of `jax.set_mesh`.
      **options: of all three layers: use_bias, implementation, dtype, param_dtype, kernel_init,
        bias_init and rngs, as `ColumnParallelLinear` takes them.

    Raises:
      ValueError: if the key and value heads do not divide the heads; and what the layers raise.
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
        mesh: Mesh | None = None,
        **options: Unpack[LinearOptions],
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
        if devices := known_axis_size(axis_name, mesh):
            layer_checks.features("num_heads", num_heads, axis_name, devices)
            layer_checks.features("num_key_value_heads", num_key_value_heads, axis_name, devices)

        def column(heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                features,
                (heads, head_dim),
                axis_name=axis_name,
                gather_dimension=gather_dimension,
                mesh=mesh,
                **options,
            )

        self.query = column(num_heads)
        self.key, self.value = column(num_key_value_heads), column(num_key_value_heads)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[..., S, features] -> query, key and value; their shapes: see the class."""
        query, key, value = shared_gather(x, [self.query, self.key, self.value])
        return query, key, value
