"""The attention of a block: its projections, norms and rotation of heads, and what follows them.

Legend of local shapes: B is batch, S the sequence, or this device's part of it if a context axis
divides it, D the size of the tensor axis, s = S/D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from collective_matmul import context_attention, dot_product_attention
from models.config import LlamaConfig
from models.families.parameter_table import OUTPUT, PROJECTION
from models.layers import rotary
from models.layers.documents import Documents
from models.layers.norm import RMSNorm
from models.parameters.fp8_layers import of_layer


class ContextAxis(NamedTuple):
    """A mesh axis that divides sequences, and what exchanges keys and values over it."""

    name: str
    implementation: str | tuple[str, ...] | None = None


class Attention(nnx.Module):
    """Causal grouped-query attention; the heads are sharded over the tensor axis.

    Args:
      config: shape of the model.
      layers: the module that provides the linear layers, `collective_matmul.layers` or
        `models.layers.plain`.
      key_value_copies: number of devices that have the same keys and values.
      attention: the kernel, as `collective_matmul.dot_product_attention` takes it; None chooses.
      context: the mesh axis that divides sequences, and what exchanges keys and values, as
        `collective_matmul.context_attention` takes it; None: sequences are whole.
      window: the sliding window; None: all tokens.
      **layer_options: options of all linear layers; `fp8` is a recipe by name of the layer.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Any,
        *,
        key_value_copies: int = 1,
        attention: str | None = None,
        context: ContextAxis | None = None,
        window: int | None = None,
        **layer_options,
    ):
        self.projection = layers.AttentionProjection(
            config.features,
            config.num_heads,
            config.num_key_value_heads,
            config.head_dim,
            key_value_copies=key_value_copies,
            use_bias=config.projection_bias,
            **of_layer(PROJECTION, layer_options),
        )
        if config.query_key_norm:
            self.query_norm = RMSNorm(config.head_dim, epsilon=config.norm_epsilon)
            self.key_norm = RMSNorm(config.head_dim, epsilon=config.norm_epsilon)
        self.output = layers.RowParallelLinear(
            (config.num_heads, config.head_dim),
            config.features,
            use_bias=config.output_bias,
            **of_layer(OUTPUT, _of_rows(layer_options)),
        )
        self.sinks: nnx.Param[jax.Array] | None = nnx.data(None)
        if config.attention_sinks:
            zeros, names = jnp.zeros(config.num_heads), (layer_options["axis_name"],)
            self.sinks = nnx.Param(zeros, out_sharding=names, eager_sharding=False)
        self.config, self.window = config, window
        self.implementation, self.context = attention, context

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[B, s, features] -> [B, s, features]. Without `documents`, a sequence is one document."""
        query, key, value = self.heads(x, None if documents is None else documents.positions)
        attended = self.attend(query, key, value, documents)
        with jax.named_scope("attention_output"):
            return self.output(attended)

    @jax.named_scope("attention")
    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents | None = None
    ) -> jax.Array:
        """Causal attention of what `heads` returns: [B, S, heads/D, head_dim]."""
        segments = None if documents is None else documents.segments
        sinks = None if self.sinks is None else self.sinks[...]
        if self.context is not None:
            return context_attention(
                query,
                key,
                value,
                self.context.name,
                window=self.window,
                sinks=sinks,
                segment_ids=None if segments is None else segments.ids,
                max_segments=None if segments is None else segments.most,
                implementation=self.context.implementation,
                attention_implementation=self.implementation,
            )
        return dot_product_attention(
            query,
            key,
            value,
            window=self.window,
            sinks=sinks,
            segment_ids=segments,
            implementation=self.implementation,
        )

    def heads(
        self, x: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, of which the first two are rotated.

        Args:
          x: [B, s, features].
          positions: int32 [B, S], as `rotary.rotate` takes them.

        Returns:
          Three of [B, S, heads/D, head_dim].
        """
        with jax.named_scope("qkv"):
            query, key, value = self.projection(x)
        if self.config.query_key_norm:
            _, query = self.query_norm.beside(query)
            _, key = self.key_norm.beside(key)
        frequencies = rotary.frequencies(self.config)
        factor = rotary.attention_factor(self.config)
        with jax.named_scope("rotary"):
            query, key = (
                rotary.rotate(heads, frequencies, positions, factor=factor)
                for heads in (query, key)
            )
        return query, key, value


def _of_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a layer that writes to the residual stream."""
    return options | ({"weight_dimension": 1} if "weight_dimension" in options else {})
