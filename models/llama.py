"""Llama 3 with tensor and sequence parallelism, for use inside `jax.shard_map`.

Legend of local shapes: B is batch, S is the whole sequence, D is the size of the tensor axis, s =
S/D, V is the vocabulary. Between blocks each device holds [B, s, features] and computes norms and
residuals of its part of the sequence only. Attention and feed-forward gather the sequence into
their first matmul and scatter it out of their last one: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from collective_matmul import CHECKPOINT_NAME, all_gather_matmul
from collective_matmul import layers as collective
from models import plain, rotary, vocabulary
from models.attention import causal_attention
from models.config import LlamaConfig
from models.documents import Documents, locate_documents
from models.regather import apply_blocks
from models.sharded_weights import WeightShards, sharded_dimension

Remat = Literal["none", "dots", "full"]

_kernel_init = nnx.initializers.normal(stddev=0.02)


class RMSNorm(nnx.Module):
    """Root-mean-square norm: Zhang and Sennrich, 2019. Computes in float32, returns x's dtype."""

    def __init__(self, features: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention; the heads are sharded over the tensor axis.

    Args:
      config: shape of the model.
      layers: the module that provides the linear layers, `collective_matmul.layers` or
        `models.plain`.
      **layer_options: options of all linear layers.
    """

    def __init__(self, config: LlamaConfig, layers: Any, **layer_options):
        self.projection = layers.AttentionProjection(
            config.features,
            config.num_heads,
            config.num_key_value_heads,
            config.head_dim,
            **layer_options,
        )
        self.output = layers.RowParallelLinear(
            (config.num_heads, config.head_dim), config.features, **layer_options
        )
        self.config = config

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[B, s, features] -> [B, s, features]. Without `documents`, a sequence is one document."""
        query, key, value = self.projection(x)
        frequencies = rotary.frequencies(self.config)
        positions = None if documents is None else documents.positions
        query, key = (rotary.rotate(heads, frequencies, positions) for heads in (query, key))
        return self.output(causal_attention(query, key, value, documents))


class Block(nnx.Module):
    """Attention, then feed-forward, each applied to a norm of the residual stream and added to it.

    The arguments are those of `Attention`.
    """

    def __init__(self, config: LlamaConfig, layers: Any, **layer_options):
        self.attention_norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        self.attention = Attention(config, layers, **layer_options)
        self.feed_forward_norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        self.feed_forward = layers.GatedFeedForward(
            config.features, config.hidden_features, **layer_options
        )

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[B, s, features] -> [B, s, features]."""
        x = x + self.attention(self.attention_norm(x), documents)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nnx.Module):
    """The whole model: maps tokens to each device's columns of the logits.

    Args:
      config: shape of the model.
      axis_name: the tensor axis.
      implementation: which backends execute the collective matmuls, as the layers take it; None
        chooses for each shape. "plain" uses JAX's own collectives and matmuls instead.
      dtype: dtype of activations and of weights where they are used; parameters are float32.
      remat: what the backward recomputes: "none"; "dots", all but the results of the collective
        matmuls; "full", everything inside a block.
      weight_axis_name: a mesh axis that shards parameters, where their partition specs name it, and
        whose devices have sequences of their own. Each block gathers its weights, for the forward
        and again for the backward. None: parameters are not sharded so.
      gradient_dtype: dtype in which gradients are summed over that axis.
      rngs: random keys for the initial weights.

    Raises:
      ValueError: for an unknown `remat` or `implementation`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        axis_name: str = "tensor",
        implementation: str | Sequence[str] | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        remat: Remat = "none",
        weight_axis_name: str | None = None,
        gradient_dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        if remat not in get_args(Remat):
            raise ValueError(f"remat={remat!r}: expected one of {', '.join(get_args(Remat))}")
        options: dict[str, Any] = dict(
            axis_name=axis_name,
            dtype=dtype,
            kernel_init=_kernel_init,
            rngs=rngs,
        )
        if implementation == "plain":
            layers = plain
        else:
            layers = collective
            options["implementation"] = implementation
        self.axis_name = axis_name
        # A tuple, so that the module is hashable.
        is_sequence = not isinstance(implementation, str | None)
        self.implementation = tuple(implementation) if is_sequence else implementation
        self.dtype = dtype
        self.remat: Remat = remat
        self.weight_axis_name, self.gradient_dtype = weight_axis_name, gradient_dtype
        self.embedding = nnx.Param(
            _kernel_init(rngs.params(), (config.vocabulary_size, config.features), jnp.float32),
            out_sharding=(axis_name, None),
            eager_sharding=False,
        )
        self.layers = nnx.List([Block(config, layers, **options) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        self.head = (
            None
            if config.tied_head
            else layers.ColumnParallelLinear(config.features, config.vocabulary_size, **options)
        )

    def __call__(self, tokens: jax.Array, document_lengths: jax.Array | None = None) -> jax.Array:
        """The logits of the token after each token.

        Args:
          tokens: int32 [B, S].
          document_lengths: int32 [B, M], the lengths of the documents in each sequence, in order,
            and then zeros; they add up to S. Attention does not cross their ends, and positions
            count from 0 in each. None: a sequence is one document.

        Returns:
          [B, S, V/D] in `dtype`.
        """
        documents = None
        if document_lengths is not None:
            documents = locate_documents(document_lengths, tokens.shape[1])
        table = self._table(nnx.State({"embedding": self.embedding}))
        x = vocabulary.embed(tokens, table, self.axis_name)
        x, outside = self._apply_blocks(x, documents)
        x = self.norm(x)
        if self.head is not None:
            head: Any = nnx.merge(nnx.graphdef(self.head), self.gather(outside["head"]))
            return head(x)
        table = self._table(outside)
        if self.implementation == "plain":
            return jax.lax.all_gather(x, self.axis_name, axis=1, tiled=True) @ table.T
        return all_gather_matmul(
            x, table.T, self.axis_name, gather_dimension=1, implementation=self.implementation
        )

    def _table(self, parameters: nnx.State) -> jax.Array:
        """The embedding [V/D, features] in `dtype`, whole along the axis that shards weights."""
        embedding: Any = self.gather(parameters)["embedding"]
        return embedding[...].astype(self.dtype)

    def _apply_blocks(
        self, x: jax.Array, documents: Documents | None
    ) -> tuple[jax.Array, nnx.State]:
        """The residual stream after all blocks, and the parameters outside of blocks.

        If weights are sharded, those of the head wait to be gathered until the last block begins.
        """
        graph = nnx.graphdef(self.layers[0])
        outside = nnx.state(self, lambda path, _: path[0] != "layers")

        def apply(state: nnx.State, x: jax.Array, documents: Documents | None) -> jax.Array:
            block: Any = nnx.merge(graph, state)
            return block(x, documents)

        # All blocks have the same graph, so one function is traced once for all of them.
        apply = _rematerialize(apply, self.remat)
        if self.weight_axis_name is None:
            apply_block = jax.jit(apply)
            for block in self.layers:
                x = apply_block(nnx.state(block), x, documents)
            return x, outside
        blocks = [nnx.state(block) for block in self.layers]
        return apply_blocks(apply, self.gather, blocks, x, documents, last=outside)

    def gather(self, state: nnx.State) -> nnx.State:
        """Weights from their shards, in `dtype`; what is not sharded stays as it is.

        Args:
          state: parameters of any part of the model, local.
        """
        leaves, structure = jax.tree.flatten(state)
        specs = jax.tree.leaves(nnx.get_partition_spec(state))
        for number, spec in enumerate(specs):
            dimension = sharded_dimension(spec, self.weight_axis_name)
            if self.weight_axis_name is not None and dimension is not None:
                dtype = jnp.dtype(self.dtype).name
                shards = WeightShards(self.weight_axis_name, dimension, dtype, self.gradient_dtype)
                leaves[number] = shards.gather(leaves[number])
        return jax.tree.unflatten(structure, leaves)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        document_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Cross-entropy of each target in nats: int32 [B, S] and [B, S] -> float32 [B, S].

        The other arguments are those of a call.
        """
        logits = self(tokens, document_lengths)
        return vocabulary.cross_entropy(logits, targets, self.axis_name)


def _rematerialize(fun, remat: Remat):
    if remat == "none":
        return fun
    policies = jax.checkpoint_policies
    names = CHECKPOINT_NAME, plain.CHECKPOINT_NAME
    policy = policies.save_only_these_names(*names) if remat == "dots" else None
    return jax.checkpoint(fun, policy=policy)
