"""Llama 3 with tensor, sequence and context parallelism, for use inside `jax.shard_map`.

Legend of local shapes: B is batch, S is the sequence, or this device's part of it if a context axis
divides it, D is the size of the tensor axis, s =
S/D, V is the vocabulary. Between blocks each device holds [B, s, features] and computes norms and
residuals of its part of the sequence only. Attention and feed-forward gather the sequence into
their first matmul and scatter it out of their last one: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from collective_matmul import all_gather_matmul
from collective_matmul import layers as collective
from collective_matmul.layers import RouterStatistics
from models.blocks.apply import apply_blocks
from models.blocks.loop import BlockLoop, Scanned, Unrolled
from models.blocks.rematerialization import (
    Remat,
    recomputes_feed_forward,
    rematerialize,
    rematerialize_halves,
)
from models.config import LlamaConfig
from models.families.parameter_table import EXPERTS, FEED_FORWARD, LANGUAGE_HEAD
from models.layers import plain, vocabulary
from models.layers.attention import Attention, ContextAxis
from models.layers.chunked_loss import loss_in_chunks
from models.layers.documents import Documents, locate_documents, locate_part
from models.layers.experts import ExpertPlacement, make_experts, no_statistics, with_statistics_of
from models.layers.norm import RMSNorm
from models.parameters.adapters import Training, set_dropout, tie_adapters
from models.parameters.fp8_layers import DEFAULT_FP8_LAYERS, of_layer, recipes
from models.parameters.stacked import Keys, stack_blocks
from models.parameters.use import ParameterUse, Unchanged, arrays_of, used

#: The residual stream [B, s, features], and the statistics of all routers that it has passed.
Stream = tuple[jax.Array, RouterStatistics | None]

_kernel_init = nnx.initializers.normal(stddev=0.02)


class Block(nnx.Module):
    """Attention, then feed-forward or experts, each applied to a norm of the residual stream and
    added to it.

    The arguments are those of `Attention`, and `experts` says where experts are, if there are any,
    and `layer` is the number of the block.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Any,
        *,
        key_value_copies: int = 1,
        attention: str | None = None,
        context: ContextAxis | None = None,
        experts: ExpertPlacement | None = None,
        layer: int = 0,
        **layer_options,
    ):
        self.attention_norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        own: dict[str, Any] = {"key_value_copies": key_value_copies, "context": context}
        own["window"] = config.window_of(layer)
        self.attention = Attention(config, layers, attention=attention, **own, **layer_options)
        self.feed_forward_norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        self.has_experts = config.num_experts is not None
        options = of_layer(EXPERTS if self.has_experts else FEED_FORWARD, layer_options)
        if self.has_experts:
            placement = experts or ExpertPlacement(layer_options["axis_name"])
            self.experts = make_experts(config, placement, **options)
        else:
            self.feed_forward = layers.GatedFeedForward(
                config.features, config.hidden_features, **options
            )

    def __call__(
        self, x: jax.Array, documents: Documents | None = None, remat: Remat = "none"
    ) -> tuple[jax.Array, RouterStatistics | None]:
        """[B, s, features] -> [B, s, features], and what `feed` returns beside it.

        Args:
          x: the residual stream.
          documents: as `Attention` takes them.
          remat: which of its halves the backward recomputes, as `rematerialize_halves` takes it.
        """
        attended, fed = rematerialize_halves(self._attended, self._fed, remat)
        return fed(attended(x, documents))

    def _attended(self, x: jax.Array, documents: Documents | None) -> jax.Array:
        """The residual stream after attention."""
        x, normed = self.attention_norm.beside(x)
        return x + self.attention(normed, documents)

    def _fed(self, x: jax.Array) -> tuple[jax.Array, RouterStatistics | None]:
        """The residual stream after the feed-forward, and what `feed` returns beside it."""
        x, normed = self.feed_forward_norm.beside(x)
        fed, statistics = self.feed(normed)
        return x + fed, statistics

    @jax.named_scope("feed_forward")
    def feed(self, x: jax.Array) -> tuple[jax.Array, RouterStatistics | None]:
        """The feed-forward or the experts: [B, s, features] -> [B, s, features], and the statistics
        of the router on this device's tokens, if there is one."""
        if self.has_experts:
            return self.experts(x)
        return self.feed_forward(x), None


def _layers_and_options(
    implementation: str | Sequence[str] | None, fp8: str | None, fp8_layers: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """The module that has the layers, and the options that follow from these arguments."""
    if implementation == "plain":
        if fp8 is not None:
            raise ValueError(f"fp8={fp8!r}: the layers of implementation='plain' have no fp8")
        return plain, {}
    quantized = {} if fp8 is None else {"fp8": recipes(fp8, fp8_layers)}
    return collective, {"implementation": implementation, **quantized}


class Llama(nnx.Module):
    """The whole model: maps tokens to each device's columns of the logits.

    Args:
      config: shape of the model.
      axis_name: the tensor axis.
      implementation: which backends execute the collective matmuls, as the layers take it; None
        chooses for each shape. "plain" uses JAX's own collectives and matmuls instead.
      fp8: the recipe by which layers quantize their operands to 8 bits, as they take it, or None.
      fp8_layers: which layers do, as `fnmatch` patterns of the names in `FP8_LAYERS`.
      dtype: dtype of activations and of weights where they are used; parameters are float32.
      remat: what the backward recomputes: "none"; "dots", all but the results of the collective
        matmuls and of attention; "projections", the feed-forward and all else but the results of
        attention and of the matmuls beside it; "attention", all but the results of attention;
        "full", everything inside a block.
      attention: the kernel of attention, as `collective_matmul.dot_product_attention` takes it;
        None chooses what was measured to be fastest.
      scan_layers: blocks per iteration of a scan over blocks, whose parameters then are stacked:
        "layers.0.norm.scale" [features] of each layer becomes "layers.norm.scale" [layers,
        features]. The time to compile does not depend on the number of layers. 0: one program of
        all layers.
      parameter_use: what is done to parameters before they are used, and to their gradients; for
        trainers that shard parameters over other axes.
      weight_axis_name: such an axis, over which the linear layers gather their kernels themselves,
        in the loops of their matmuls. It shards the batch too, and the features of the
        embedding.
      weight_dimension: what it shards of kernels that multiply the residual stream: 0 for input
        features, 1 for heads, hidden features or vocabulary, which is faster. Of kernels that write
        to it, output features.
      key_value_copies: number of devices of the tensor axis that have the same keys and values:
        `LlamaConfig.key_value_copies` of its size.
      loss_chunk: the most tokens of a sequence whose logits `loss` has at one time, for long
        sequences; its backward computes them again. The head then gathers its weight once, and not
        in the loops of its matmuls. None: all.
      context_axis_name: a mesh axis that divides sequences in the layout of
        `collective_matmul.zigzag_order`, or None. Each device then has its part of the tokens, and
        of everything that is made of them; lengths of documents are those of whole sequences.
      context_implementation: what exchanges keys and values over it, as
        `collective_matmul.context_attention` takes it.
      expert_axis_name: the mesh axis that experts are divided over, or several, of those of the
        batch and the tensor axis; default: the tensor axis.
      expert_hidden_axis_name: such an axis that divides the hidden features of experts, or None.
      expert_implementation: what exchanges tokens, as `collective_matmul.expert_mlp` takes it;
        with implementation="plain" it is "xla". Experts multiply in `dtype`, not in 8 bits.
      recompute_expert_hidden: whether the backward computes the hidden features of experts again,
        as `collective_matmul.expert_mlp` does; it does so with remat="projections", "attention"
        and "full".
      training: which parameters are trained, and the adapters of linear layers; None: all, and
        none. With frozen parameters, `parameter_use` is None.
      rngs: random keys for the initial weights.

    Raises:
      ValueError: for an unknown `remat`, `implementation` or `fp8`, a pattern that matches no
        layer, a `loss_chunk` of no token, or a number of layers that the period of their kinds does
        not divide, with `scan_layers`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        axis_name: str = "tensor",
        implementation: str | Sequence[str] | None = None,
        fp8: str | None = None,
        fp8_layers: Sequence[str] = DEFAULT_FP8_LAYERS,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        remat: Remat = "none",
        attention: str | None = None,
        scan_layers: int = 0,
        parameter_use: ParameterUse | None = None,
        weight_axis_name: str | None = None,
        weight_dimension: Literal[0, 1] = 1,
        key_value_copies: int = 1,
        loss_chunk: int | None = None,
        context_axis_name: str | None = None,
        context_implementation: str | Sequence[str] | None = None,
        expert_axis_name: str | Sequence[str] | None = None,
        expert_hidden_axis_name: str | None = None,
        expert_implementation: str | Sequence[str] | None = None,
        recompute_expert_hidden: bool = False,
        training: Training | None = None,
        rngs: nnx.Rngs | Keys,
    ):
        if remat not in get_args(Remat):
            raise ValueError(f"remat={remat!r}: expected one of {', '.join(get_args(Remat))}")
        if loss_chunk is not None and loss_chunk < 1:
            raise ValueError(f"loss_chunk={loss_chunk}: expected at least 1 token, or None for all")
        if scan_layers and config.num_layers % config.layer_period:
            raise ValueError(
                f"scan_layers={scan_layers}: num_layers={config.num_layers} is not a multiple of"
                f" full_attention_period={config.full_attention_period}, whose layers are an"
                " iteration; choose 0"
            )
        layers, options = _layers_and_options(implementation, fp8, fp8_layers)
        options |= dict(axis_name=axis_name, dtype=dtype, kernel_init=_kernel_init, rngs=rngs)
        self.freezes = training is not None and training.freezes
        if training is not None and training.freezes:
            options["training"] = training
        if weight_axis_name is not None:
            options |= dict(weight_axis_name=weight_axis_name, weight_dimension=weight_dimension)
        placement = ExpertPlacement.of(
            axis_name if expert_axis_name is None else expert_axis_name,
            expert_hidden_axis_name,
            "xla" if implementation == "plain" else expert_implementation,
            # The op computes them for one device's tokens at a time. `jax.checkpoint` would do so
            # for all devices' at once, and exchange the tokens again for them.
            recompute_expert_hidden or recomputes_feed_forward(remat),
        )
        self.config = config
        self.axis_name = axis_name
        self.implementation = _hashable(implementation)
        self.context = None
        if context_axis_name is not None:
            self.context = ContextAxis(context_axis_name, _hashable(context_implementation))
        self.head_fp8 = options.get("fp8", {}).get(LANGUAGE_HEAD.name)
        self.dtype = dtype
        self.remat: Remat = remat
        self.num_layers, self.scan_layers = config.num_layers, scan_layers
        self.vocabulary_size = config.vocabulary_size
        self.parameter_use = parameter_use
        self.loss_chunk = loss_chunk
        # A tied head needs the whole table.
        self.column_axis_name = None if config.tied_head else weight_axis_name
        self.embedding = nnx.Param(
            _kernel_init(rngs.params(), (config.vocabulary_rows, config.features), jnp.float32),
            out_sharding=(axis_name, None),
            eager_sharding=False,
        )

        def block(rngs: nnx.Rngs | Keys, layer: int = 0) -> Block:
            own: dict[str, Any] = {"key_value_copies": key_value_copies, "attention": attention}
            own["context"] = self.context
            own |= {"experts": placement, "layer": layer, **options, "rngs": rngs}
            return Block(config, layers, **own)

        count = config.num_layers
        if scan_layers:
            self.layers = stack_blocks(block, count, rngs)
        else:
            self.layers = nnx.List([block(rngs, layer) for layer in range(count)])
        self.norm = RMSNorm(config.features, epsilon=config.norm_epsilon)
        self.head = (
            None
            if config.tied_head
            else layers.ColumnParallelLinear(
                config.features,
                config.vocabulary_rows,
                **of_layer(LANGUAGE_HEAD, self._of_head(options)),
            )
        )

    def _of_head(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the head: in chunks it would gather its weight for each."""
        if self.loss_chunk is None:
            return options
        own = ("weight_axis_name", "weight_dimension")
        return {name: value for name, value in options.items() if name not in own}

    def __call__(
        self,
        tokens: jax.Array,
        document_lengths: jax.Array | None = None,
        gathered: nnx.State | None = None,
    ) -> jax.Array:
        """The logits of the token after each token.

        Args:
          tokens: int32 [B, S].
          document_lengths: int32 [B, M], the lengths of the documents in each sequence, in order,
            and then zeros; they add up to S. Attention does not cross their ends, and positions
            count from 0 in each. None: a sequence is one document.
          gathered: the state of the model with weights that were gathered before, for
            `parameter_use`.

        Returns:
          [B, S, V/D] in `dtype`.
        """
        return self.logits_and_statistics(tokens, document_lengths, gathered)[0]

    def logits_and_statistics(
        self,
        tokens: jax.Array,
        document_lengths: jax.Array | None = None,
        gathered: nnx.State | None = None,
    ) -> tuple[jax.Array, RouterStatistics | None]:
        """The logits of a call, and the statistics of the routers.

        Returns:
          [B, S, V/D], and statistics [layers, *] of this device's tokens, which have gradients:
          `RouterStatistics.sum_over_devices` over the axes of the batch and the tensor axis makes
          them those of all, and `sum_over_layers` those that Hugging Face's balancing loss is of.
          None for a model without experts.
        """
        x, statistics, weights = self._hidden(tokens, document_lengths, gathered, None)
        return self._logits(x, weights), statistics

    def _hidden(
        self,
        tokens: jax.Array,
        document_lengths: jax.Array | None,
        gathered: nnx.State | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, RouterStatistics | None, nnx.State]:
        """The input of the head [B, s, features], the statistics of the routers, and the weights
        of the head and of the embedding."""
        documents = None
        if self.context is not None:
            documents = locate_part(document_lengths, tokens.shape[1], self.context.name)
        elif document_lengths is not None:
            documents = locate_documents(document_lengths, tokens.shape[1])
        parameters = nnx.state(self)
        whole = self.column_axis_name is None
        embedding = self._weights(_select(parameters, "embedding"), gathered, whole=whole)
        x = self._embed(tokens, embedding)
        x = x, no_statistics(self.config, x)
        arguments = parameters, gathered, dropout_key
        (x, statistics), weights = self._apply_blocks(x, documents, *arguments)
        norm: Any = nnx.merge(nnx.graphdef(self.norm), weights["norm"])
        names = ["embedding"] if self.head is None else ["head"]
        return norm(x), statistics, _select(embedding | weights, *names)

    @jax.named_scope("embedding")
    def _embed(self, tokens: jax.Array, weights: nnx.State) -> jax.Array:
        """[B, S] -> [B, S/D, features]."""
        if self.column_axis_name is None:
            return vocabulary.embed(tokens, arrays_of(self._table(weights)), self.axis_name)
        # Gradients of more tokens are summed here than elsewhere, so not in `dtype`.
        columns: Any = weights["embedding"]
        options: Any = {"column_axis_name": self.column_axis_name, "dtype": self.dtype}
        return vocabulary.embed(tokens, columns[...], self.axis_name, **options)

    @jax.named_scope("head")
    def _logits(self, x: jax.Array, weights: nnx.State) -> jax.Array:
        """[B, s, features] -> [B, S, V/D]; columns that stand for no token have no probability."""
        logits = self._products(x, weights)
        return vocabulary.without_padding(logits, self.vocabulary_size, self.axis_name)

    def _products(self, x: jax.Array, weights: nnx.State) -> jax.Array:
        """[B, s, features] -> [B, S, V/D], by the head or by the embedding."""
        if self.head is not None:
            head: Any = nnx.merge(nnx.graphdef(self.head), weights["head"])
            return head(x)
        table = self._table(weights).T
        if self.implementation == "plain":
            return jax.lax.all_gather(x, self.axis_name, axis=1, tiled=True) @ table
        options: Any = {"implementation": self.implementation, "fp8": self.head_fp8}
        return all_gather_matmul(x, table, self.axis_name, gather_dimension=1, **options)

    def _table(self, weights: nnx.State) -> jax.Array:
        """The embedding [V/D, features] in `dtype`."""
        embedding: Any = weights["embedding"]
        return embedding.get_value().astype(self.dtype)

    def _weights(
        self, parameters: nnx.State, gathered: nnx.State | None, *, whole: bool = False
    ) -> nnx.State:
        """The weights of parts of the model. `gathered` may have more parts."""
        if self.parameter_use is None:
            return parameters
        own = None if gathered is None else _select(gathered, *parameters)
        return used(parameters, own, self.parameter_use, whole)

    def _apply_blocks(
        self,
        x: Stream,
        documents: Documents | None,
        parameters: nnx.State,
        gathered: nnx.State | None,
        dropout_key: jax.Array | None,
    ) -> tuple[Stream, nnx.State]:
        """The residual stream after all blocks, and the weights of what follows: norm and head, or
        the embedding where it is gathered again."""
        use = self.parameter_use
        gathers_blocks = use is not None and use.gathers == "blocks"
        names = ["norm"] + ["head"] * (self.head is not None)
        names += ["embedding"] * (gathers_blocks and self.head is None)
        last = _select(parameters, *names)
        block: Any = self.layers if self.scan_layers else self.layers[0]
        graph = nnx.graphdef(block)

        def apply(
            kind: int, weights: nnx.State, x: Stream, documents: Documents | None, key: Any = None
        ) -> Stream:
            block: Any = nnx.merge(graph, weights)
            block.attention.window = self.config.window_of(kind)
            set_dropout(block, key)
            y, statistics = block(x[0], documents, self.remat)
            return y, with_statistics_of(x[1], statistics)

        # All blocks have the same graph but for their window, so one function is traced once for
        # all of a kind.
        kinds = range(self.config.layer_period)
        funs = [rematerialize(functools.partial(apply, kind), self.remat) for kind in kinds]
        loop, own = self._loop(parameters)
        others = None if gathered is None else self._loop(gathered)[1]
        if self.freezes:
            # JAX's own derivative computes nothing for what is not differentiated. Keys are
            # arguments, so what is computed again has the same masks.
            keys = _keys(dropout_key, loop.count)
            x = loop.applied(funs, own, keys, x, documents, tie=tie_adapters)
            return x, self._weights(last, gathered)
        if self.scan_layers or use is not None:
            waiting: dict[str, Any] = {}
            if gathers_blocks:
                before = None if gathered is None else _select(gathered, *names)
                waiting = {"last": last, "gathered_last": before}
            use = use or Unchanged()
            x, weights = apply_blocks(funs, use, loop, own, others, x, documents, **waiting)
            if gathers_blocks:
                return x, weights
        else:
            funs = [jax.jit(fun) for fun in funs]
            for number in range(self.num_layers):
                whole = None if others is None else others[number]
                x = funs[number % len(funs)](self._weights(own[number], whole), x, documents)
        # Else a head that has its own weight_axis_name gathers it.
        return x, self._weights(last, gathered, whole=self.loss_chunk is not None)

    def _loop(self, state: nnx.State) -> tuple[BlockLoop, Any]:
        """The loop over blocks, and the parameters of the blocks as it takes them."""
        blocks: Any = state["layers"]
        count, period = self.num_layers, self.config.layer_period
        if self.scan_layers:
            return Scanned(count, self.scan_layers, period), blocks
        return Unrolled(count, period), [blocks[number] for number in range(count)]

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        document_lengths: jax.Array | None = None,
        gathered: nnx.State | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Cross-entropy of each target in nats: int32 [B, S] and [B, S] -> float32 [B, S].

        The other arguments are those of a call, and the random key of the adapters' dropout; None
        for no dropout. Devices with sequences of their own have keys of their own.
        """
        options = document_lengths, gathered, dropout_key
        return self.loss_and_statistics(tokens, targets, *options)[0]

    def loss_and_statistics(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        document_lengths: jax.Array | None = None,
        gathered: nnx.State | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterStatistics | None]:
        """`loss`, without any loss of the routers, and the statistics that these are made of: see
        `logits_and_statistics`."""
        x, statistics, weights = self._hidden(tokens, document_lengths, gathered, dropout_key)
        if not self._loss_in_chunks(tokens.shape[1]):
            return self._cross_entropy(weights, x, targets), statistics
        assert self.loss_chunk is not None
        each = loss_in_chunks(self._cross_entropy, weights, x, targets, self.loss_chunk)
        return each, statistics

    def _cross_entropy(self, weights: nnx.State, x: jax.Array, targets: jax.Array) -> jax.Array:
        """[B, s, features] and int32 [B, S] -> float32 [B, S], by the head and the loss."""
        return vocabulary.cross_entropy(self._logits(x, weights), targets, self.axis_name)

    def _loss_in_chunks(self, length: int) -> bool:
        """Whether the loss of sequences of a length is computed in chunks."""
        if self.loss_chunk is None or length % jax.lax.axis_size(self.axis_name):
            return False
        return self.loss_chunk < length


def _hashable(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Names of backends as a module can hold them."""
    is_sequence = not isinstance(implementation, str | None)
    return tuple(implementation) if is_sequence else implementation


def _keys(key: jax.Array | None, count: int) -> jax.Array | None:
    """A random key for each block."""
    return None if key is None else jax.random.split(key, count)


def _select(state: nnx.State, *names: str) -> nnx.State:
    """Parts of a state."""
    return nnx.State({name: state[name] for name in names})
