"""The loss of `models.llama.Llama` over global arrays, on a mesh whose axes are of type Explicit.

It calls neither `jax.shard_map` nor a collective. The types of arrays say how they are sharded, and
`collective_matmul.overlap` finds from them which matmuls communicate. Legend of global shapes: B is
batch, S sequence, N query heads, K key and value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from models import rotary
from models.config import LlamaConfig
from models.llama import Block, Llama, rematerialize
from models.plain import CHECKPOINT_NAME

#: Sites in the program of a loss and its gradients: of the block, as all blocks are calls of one
#: function, and of the head. As many backward as forward, and gradients of weights that are summed
#: over the batch: those of weights whose matmul is after a gather.
SITES = (4 + 4 + 5) + (1 + 1 + 1)


def loss(
    model: Llama, config: LlamaConfig, tokens: jax.Array, targets: jax.Array, batch_axis: str
) -> jax.Array:
    """Cross-entropy of each target in nats.

    Args:
      model: a model without stacked layers, its parameters global, float32, sharded over
        `model.axis_name` as its metadata say.
      config: shape of the model.
      tokens: int32 [B, S], sharded over `batch_axis`.
      targets: int32 [B, S], sharded over `batch_axis`.
      batch_axis: the mesh axis of the batch.

    Returns:
      float32 [B, S], sharded over `batch_axis`.
    """
    specs = _Specs(batch_axis, model.axis_name)
    table = model.embedding[...].astype(model.dtype)
    with jax.named_scope("embedding"):
        x = table.at[tokens].get(out_sharding=specs.rows)

    def apply(block: Block, x: jax.Array) -> jax.Array:
        return _block(block, x, config, model.dtype, specs)

    # All blocks have the same graph, so one function is traced once for all of them.
    apply_block = jax.jit(rematerialize(apply, model.remat))
    layers: Any = model.layers
    for number in range(config.num_layers):
        x = apply_block(layers[number], x)
    head = table.T if model.head is None else model.head.kernel[...].astype(model.dtype)
    with jax.named_scope("head"):
        logits = reshard(model.norm(x), specs.whole) @ head
    return _cross_entropy(logits, targets)


class _Specs:
    """How activations are sharded.

    Attributes:
      rows: [B, S, features], the sequence over the tensor axis.
      whole: the same with the whole sequence.
      heads: [B, S, N, H], heads over the tensor axis.
      groups: [B, S, K, N / K, H], heads of keys and values over it.
    """

    def __init__(self, batch_axis: str, tensor_axis: str):
        self.rows, self.whole = P(batch_axis, tensor_axis), P(batch_axis)
        self.heads = P(batch_axis, None, tensor_axis)
        self.groups = P(batch_axis, None, tensor_axis, None, None)


def _block(block: Block, x: jax.Array, config: LlamaConfig, dtype: Any, specs: _Specs) -> jax.Array:
    """[B, S, features] -> the same shape, as `models.llama.Block`."""
    x = x + _attention(block.attention, block.attention_norm(x), config, dtype, specs)
    whole = reshard(block.feed_forward_norm(x), specs.whole)
    layers: Any = block.feed_forward
    gate, up, down = (
        layer.kernel[...].astype(dtype) for layer in (layers.gate, layers.up, layers.down)
    )
    with jax.named_scope("feed_forward"):
        gated = jax.nn.silu(_named(whole @ gate)) * _named(whole @ up)
        return x + _named(jnp.dot(gated, down, out_sharding=specs.rows))


def _attention(
    layers: Any, x: jax.Array, config: LlamaConfig, dtype: Any, specs: _Specs
) -> jax.Array:
    """[B, S, features] -> the same shape. Causal, with grouped heads."""
    whole, frequencies = reshard(x, specs.whole), rotary.frequencies(config)
    projections: Any = layers.projection
    query, key, value = (
        _named(jnp.einsum("bsd,dnh->bsnh", whole, layer.kernel[...].astype(dtype)))
        for layer in (projections.query, projections.key, projections.value)
    )
    query, key = (rotary.rotate(heads, frequencies) for heads in (query, key))
    with jax.named_scope("attention"):
        batch, length, heads, size = query.shape
        groups = (batch, length, key.shape[2], heads // key.shape[2], size)
        query = query.reshape(groups, out_sharding=specs.groups)
        scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key, preferred_element_type=jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
        scores = jnp.where(causal, scores * size**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(dtype)
        attended = jnp.einsum("bkgqs,bskh->bqkgh", weights, value)
        attended = attended.reshape((batch, length, heads, size), out_sharding=specs.heads)
    with jax.named_scope("attention_output"):
        kernel = layers.output.kernel[...].astype(dtype)
        return _named(jnp.einsum("bsnh,nhd->bsd", attended, kernel, out_sharding=specs.rows))


@jax.named_scope("loss")
def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """[B, S, V] and [B, S] -> float32 [B, S]."""
    wide = logits.astype(jnp.float32)
    vocabulary = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    found = jnp.sum(jnp.where(vocabulary == targets[..., None], wide, 0), axis=-1)
    return jax.nn.logsumexp(wide, axis=-1) - found


def _named(y: jax.Array) -> jax.Array:
    return checkpoint_name(y, CHECKPOINT_NAME)
