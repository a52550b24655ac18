"""The loss of `models.llama.Llama` over global arrays, on a mesh whose axes are of type Explicit.

It calls no collective. The types of arrays say how they are sharded, and from them
`collective_matmul.overlap` finds which matmuls communicate. The code of the blocks is that of
`models.llama`, with layers over global arrays. Attention and the search for documents are local to
a device, for kernels that take local arrays: only these are in a `jax.shard_map`. Legend of global
shapes: B is batch, S sequence, M the largest number of documents in a sequence, V the rows of the
vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from models.blocks.loop import Scanned, Unrolled
from models.blocks.rematerialization import rematerialize
from models.config import LlamaConfig
from models.explicit import layers as explicit_layers
from models.explicit.layers import batch_axes
from models.families.parameter_table import DENSE
from models.layers.documents import Documents, locate_documents
from models.llama import Block, Llama
from models.parameters.stacked import Keys

#: The kernels of the linear layers of a block, and of the head.
_KERNELS = {parameter.path for parameter in DENSE if parameter.group is not None}


def count_sites(gathered: Collection[str] = ()) -> int:
    """The minimum number of sites in the program of a loss.

    All blocks are calls of one function, whose sites count once: two gathers and two scatters. The
    head has a gather. So has each weight that is sharded over an axis of the batch.

    Args:
      gathered: names of the parameters that `loss` gathers over one of these axes; of layers,
        without their numbers, as "layers.feed_forward.up.kernel".
    """
    return (2 + 2) + 1 + len(_KERNELS.intersection(gathered))


class GatheredWeight(NamedTuple):
    """A weight that was gathered before, with the shards that it was made of.

    A model computes with the weight, and gradients are with respect to the shards: the backward of
    the block that uses the weight shards its gradient at once, so that none stays whole.

    Attributes:
      shards: the array to differentiate with respect to.
      weight: what `whole` returns for it, in the same dtype.
    """

    shards: jax.Array
    weight: jax.Array


#: A block as a function of its kind, its parameters, its input, documents and None.
ApplyBlock = Callable[[int, Any, jax.Array, Documents | None, None], jax.Array]


def loss(
    model: Llama,
    config: LlamaConfig,
    tokens: jax.Array,
    targets: jax.Array,
    document_lengths: jax.Array | None = None,
) -> jax.Array:
    """Cross-entropy of each target in nats.

    Args:
      model: a model whose parameters are global, float32, sharded over `model.axis_name` as its
        metadata say, or `GatheredWeight`s. Its own layers are not called.
      config: shape of the model.
      tokens: int32 [B, S], sharded over the axes of the batch.
      targets: int32 [B, S], sharded as `tokens`.
      document_lengths: int32 [B, M], sharded as `tokens`: see `Llama`.

    Returns:
      float32 [B, S], sharded as `tokens`.

    Raises:
      ValueError: for a model with experts.
    """
    if config.num_experts is not None:
        raise ValueError(
            f"num_experts={config.num_experts}: models with experts are not computed over global"
            " arrays; use `Llama.loss` in a shard_map, as the trainer does with --overlap auto"
        )
    documents = None
    if document_lengths is not None:
        documents = _documents(document_lengths, tokens.shape[1])
    batch = batch_axes(tokens)
    x, head = _embed(model, tokens)
    x = _apply_blocks(model, config, x, documents)
    with jax.named_scope("head"):
        logits = reshard(model.norm(x), P(batch)) @ head
        logits = _without_padding(logits, config.vocabulary_size)
    return _cross_entropy(logits, targets)


@jax.named_scope("embedding")
def _embed(model: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, S] -> [B, S, features], the sequence sharded; and the head's matrix, which may be the
    table's transpose."""
    batch, tensor, dtype = batch_axes(tokens), model.axis_name, model.dtype
    embedding: Any = model.embedding.get_value()
    table = _weight_of(embedding)
    columns = jax.typeof(table).sharding.spec[1]
    if model.head is None:
        table = whole(table, tensor, dtype).astype(dtype)
        # XLA would add whole gradients of both uses: each has to shard its own.
        head = _weight_of(embedding) if _is_gathered(embedding) else table
        return table.at[tokens].get(out_sharding=P(batch, tensor)), head.T
    head = whole(_weight_of(model.head.kernel.get_value()), tensor, dtype).astype(dtype)
    if columns is None:
        return table.astype(dtype).at[tokens].get(out_sharding=P(batch, tensor)), head
    # Tokens and activations travel, and not the table. Gradients of more tokens are summed here
    # than elsewhere, so not in `dtype`.
    names = batch if isinstance(batch, tuple) else (batch,)
    others = tuple(name for name in names if name != columns) or None
    found = table.at[reshard(tokens, P(others))].get(out_sharding=P(others, tensor, columns))
    return reshard(found.astype(dtype), P(batch, tensor)), head


def _apply_blocks(
    model: Llama, config: LlamaConfig, x: jax.Array, documents: Documents | None
) -> jax.Array:
    """[B, S, features] -> the same shape, by all blocks."""
    block = _block(model, config)
    if model.remat in ("none", "projections") and _gathers(model):
        # Else whole weights would be kept for the backward. XLA does not merge gathers, and may
        # fuse again what is cheap.
        options: Any = dict(policy=_is_not_gathered, prevent_cse=False)
        block = jax.checkpoint(block, static_argnums=0, **options)
    # All blocks of a kind have the same graph, so one function is traced once for all of them.
    kinds = range(config.layer_period)
    funs = [rematerialize(functools.partial(block, kind), model.remat) for kind in kinds]
    layers: Any = model.layers
    if model.scan_layers:
        loop = Scanned(model.num_layers, model.scan_layers, config.layer_period)
        return loop.applied(funs, nnx.state(layers), None, x, documents)
    loop = Unrolled(model.num_layers, config.layer_period)
    return loop.applied(funs, [nnx.state(layer) for layer in layers], None, x, documents)


def _block(model: Llama, config: LlamaConfig) -> ApplyBlock:
    """`models.llama.Block` with layers over global arrays, as a function."""

    def build() -> Block:
        return Block(
            config,
            explicit_layers,
            key_value_copies=config.key_value_copies(_size(model.axis_name)),
            axis_name=model.axis_name,
            dtype=model.dtype,
            kernel_init=nnx.initializers.zeros,
            rngs=Keys(jax.random.key(0)),
        )

    graph = nnx.graphdef(nnx.eval_shape(build))

    def gathered(parameter: jax.Array | GatheredWeight) -> jax.Array:
        return whole(_weight_of(parameter), model.axis_name, model.dtype)

    def apply(
        kind: int, weights: nnx.State, x: jax.Array, documents: Documents | None, key: None
    ) -> jax.Array:
        del key
        own: Any = nnx.merge(graph, jax.tree.map(gathered, weights, is_leaf=_is_gathered))
        own.attention.window = config.window_of(kind)
        return own(x, documents, model.remat)[0]

    return apply


def whole(parameter: jax.Array, axis_name: str, dtype: Any) -> jax.Array:
    """The weight of a parameter, which may be sharded over further axes than `axis_name`.

    Returns:
      The weight in `dtype`, sharded over `axis_name` alone; a parameter that no other axis shards,
      as it is.
    """
    spec = jax.typeof(parameter).sharding.spec
    own = _only(spec, axis_name)
    return parameter if own == spec else reshard(parameter.astype(dtype), own)


def _weight_of(parameter: jax.Array | GatheredWeight) -> jax.Array:
    """The weight of a `GatheredWeight`; a parameter as it is."""
    if isinstance(parameter, GatheredWeight):
        return _with_gradient_of_shards(jax.typeof(parameter.shards).sharding, *parameter)
    return parameter


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient_of_shards(
    sharding: NamedSharding, shards: jax.Array, weight: jax.Array
) -> jax.Array:
    """The weight, whose gradient becomes that of its shards."""
    del sharding, shards
    return weight


def _forward(
    sharding: NamedSharding, shards: jax.Array, weight: jax.Array
) -> tuple[jax.Array, None]:
    del sharding, shards
    return weight, None  # Its argument itself, of which loops keep no copy for the backward.


def _backward(sharding: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array, None]:
    # XLA makes one reduce-scatter of a sum and a slice, if there is no cast between them.
    return reshard(gradient, sharding), None


_with_gradient_of_shards.defvjp(_forward, _backward)


def _is_gathered(parameter: Any) -> bool:
    return isinstance(parameter, GatheredWeight)


def _only(spec: P, axis_name: str) -> P:
    """A spec that names no other axis."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return P(*(axis_name if axis_name in names else None for names in entries))


def _gathers(model: Llama) -> bool:
    """Whether blocks gather weights: further axes shard their parameters."""
    leaves = jax.tree.leaves(nnx.state(model.layers), is_leaf=_is_gathered)
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves if not _is_gathered(leaf)]
    return any(_only(spec, model.axis_name) != spec for spec in specs)


def _is_not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: arrays are gathered again, and all else is kept."""
    return primitive.name != "reshard"


def _size(axis_name: str) -> int:
    return jax.sharding.get_abstract_mesh().shape[axis_name]


def _documents(lengths: jax.Array, sequence_length: int) -> Documents:
    """`locate_documents`, by each device for its own sequences."""

    def locate(lengths: jax.Array) -> Documents:
        return locate_documents(lengths, sequence_length)

    spec = P(batch_axes(lengths))
    return jax.shard_map(locate, in_specs=spec, out_specs=spec)(lengths)


def _without_padding(logits: jax.Array, size: int) -> jax.Array:
    """[B, S, V] -> the same; columns that stand for no token have no probability."""
    if logits.shape[-1] == size:
        return logits
    is_token = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2) < size
    return jnp.where(is_token, logits, jnp.finfo(logits.dtype).min)


@jax.named_scope("loss")
def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """[B, S, V] and [B, S] -> float32 [B, S]."""
    wide = logits.astype(jnp.float32)
    vocabulary = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    found = jnp.sum(jnp.where(vocabulary == targets[..., None], wide, 0), axis=-1)
    return jax.nn.logsumexp(wide, axis=-1) - found
