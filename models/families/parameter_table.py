"""The parameters of families: names in Hugging Face's files, dimensions, sharding and kinds.

Each family has a table of its own, made of the rows here and of those in its file. What depends on
the names of parameters reads it: files of Hugging Face, optimizers, adapters, layers in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from models.config import LlamaConfig

#: Each is a size of `LlamaConfig`; "heads" are those of queries, "hidden" the hidden features of a
#: feed-forward or of one expert, and "vocabulary" counts tokens without padding.
Dimension = Literal[
    "features", "hidden", "vocabulary", "heads", "key_value_heads", "head_dim", "experts"
]
Dimensions = tuple[Dimension, ...]
#: What a parameter is for: the kernel of a linear layer of blocks; those of the experts of a layer;
#: the kernel of a router, which is small and stays whole and in float32; the embedding or the head;
#: a vector, or several, such as scales and biases.
Role = Literal["linear", "expert", "router", "vocabulary", "vector"]

_SIZES: dict[Dimension, Callable[[LlamaConfig], int | None]] = {
    "features": lambda config: config.features,
    "hidden": lambda config: config.hidden_features,
    "vocabulary": lambda config: config.vocabulary_size,
    "heads": lambda config: config.num_heads,
    "key_value_heads": lambda config: config.num_key_value_heads,
    "head_dim": lambda config: config.head_dim,
    "experts": lambda config: config.num_experts,
}


class LayerGroup(NamedTuple):
    """Linear layers that quantize their operands to 8 bits together, or not.

    Attributes:
      name: what patterns of `fp8_layers` match.
      scope: the `jax.named_scope` of their matmuls.
    """

    name: str
    scope: str


PROJECTION = LayerGroup("layers.attention.projection", "qkv")
OUTPUT = LayerGroup("layers.attention.output", "attention_output")
FEED_FORWARD = LayerGroup("layers.feed_forward", "feed_forward")
EXPERTS = LayerGroup("experts", "feed_forward")
LANGUAGE_HEAD = LayerGroup("head", "head")
LAYER_GROUPS = (PROJECTION, OUTPUT, FEED_FORWARD, EXPERTS, LANGUAGE_HEAD)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or one of each layer.

    Its shape is (*stack, *inputs, *outputs).

    Attributes:
      path: its dotted path in `models.llama.Llama`, without the number of the layer.
      tensor: its tensor in Hugging Face's files; a format of {layer}, and of {expert} if each
        expert has one.
      outputs: the dimensions of a vector, or those that its matmul keeps.
      inputs: the dimensions that its matmul contracts; none for a vector.
      stack: the dimensions that count matrices or vectors.
      sharded: the dimension that the tensor axis shards. Keys and values that several devices
        have, and experts elsewhere, are sharded differently.
      role: what it is for.
      group: the layers with which it is multiplied in 8 bits, or None.
      only_if: which models have it.
      transposed: whether the tensor has inputs and outputs in the opposite order.
      turn: which columns of the tensor are the parameter's, and in turns of how many: (1, 2) are
        every second one.
    """

    path: str
    tensor: str
    outputs: Dimensions
    inputs: Dimensions = ()
    stack: Dimensions = ()
    sharded: Dimension | None = None
    role: Role = "vector"
    group: LayerGroup | None = None
    only_if: Callable[[LlamaConfig], bool] = lambda _: True
    transposed: bool = False
    turn: tuple[int, int] = (0, 1)

    @property
    def dimensions(self) -> Dimensions:
        """Its dimensions in order, without that of stacked layers."""
        return self.stack + self.inputs + self.outputs

    @property
    def in_layers(self) -> bool:
        """Whether each layer has one."""
        return self.path.startswith("layers.")

    @property
    def path_in_block(self) -> str:
        """Its path in the block that it belongs to."""
        return self.path.removeprefix("layers.")

    @property
    def of_each_expert(self) -> bool:
        """Whether files have a tensor for each expert."""
        return "{expert}" in self.tensor

    def groups(self, config: LlamaConfig) -> tuple[tuple[int, ...], ...]:
        """For each dimension of the tensor, the sizes of the dimensions that it consists of."""
        ordered: list[Dimensions] = [self.inputs, self.outputs] if self.inputs else [self.outputs]
        if self.transposed:
            ordered.reverse()
        if not self.of_each_expert:
            ordered[:0] = [(name,) for name in self.stack]
        return tuple(tuple(_size(name, config) for name in names) for names in ordered)


def _size(name: Dimension, config: LlamaConfig) -> int:
    size = _SIZES[name](config)
    assert size is not None, name
    return size


def kernel(path: str, tensor: str, inputs: Dimensions, outputs: Dimensions, **own) -> Parameter:
    """The kernel of a linear layer, whose tensor Hugging Face stores transposed."""
    options: Any = {"role": "linear", "transposed": True, **own}
    return Parameter(path, tensor, outputs, inputs, **options)


def expert_kernels(
    router: str, matrices: str, gate: str, up: str, down: str
) -> tuple[Parameter, ...]:
    """The router of a layer and its experts, of which files have a tensor for each.

    Args:
      router: the tensor of the router, in a layer.
      matrices: those of the experts, a format of {expert} and {matrix}.
      gate: what {matrix} is, for gate.
      up: for up.
      down: for down.
    """

    def expert(own: str, matrix: str, inputs: Dimension, outputs: Dimension) -> Parameter:
        name = matrices.replace("{matrix}", matrix)
        options: Any = {"stack": ("experts",), "sharded": "experts", "role": "expert"}
        path, tensor = f"layers.experts.{own}", f"{_LAYER}{name}"
        return kernel(path, tensor, (inputs,), (outputs,), group=EXPERTS, **options)

    return (
        kernel("layers.experts.router.kernel", f"{_LAYER}{router}", ("features",), ("experts",),
               role="router"),
        expert("w_gate", gate, "features", "hidden"),
        expert("w_up", up, "features", "hidden"),
        expert("w_down", down, "hidden", "features"),
    )  # fmt: skip


def _of_heads(ours: str, theirs: str, heads: Dimension) -> tuple[Parameter, Parameter]:
    """The kernel and the bias of a projection to heads."""
    path, tensor = f"layers.attention.projection.{ours}", f"{_LAYER}self_attn.{theirs}"
    outputs: Dimensions = (heads, "head_dim")
    options: Any = {"sharded": heads}
    return (
        kernel(f"{path}.kernel", f"{tensor}.weight", ("features",), outputs, group=PROJECTION,
               **options),
        Parameter(f"{path}.bias", f"{tensor}.bias", outputs,
                  only_if=lambda config: config.projection_bias, **options),
    )  # fmt: skip


def _head_norm(ours: str, theirs: str) -> Parameter:
    path, tensor = f"layers.attention.{ours}.scale", f"{_LAYER}self_attn.{theirs}.weight"
    return Parameter(path, tensor, ("head_dim",), only_if=lambda config: config.query_key_norm)


_LAYER = "model.layers.{layer}."
_KERNELS, _BIASES = zip(
    _of_heads("query", "q_proj", "heads"),
    _of_heads("key", "k_proj", "key_value_heads"),
    _of_heads("value", "v_proj", "key_value_heads"),
    strict=True,
)
EMBEDDING = Parameter(
    "embedding", "model.embed_tokens.weight", ("features",), ("vocabulary",),
    sharded="vocabulary", role="vocabulary",
)  # fmt: skip
#: What every family has before its feed-forward.
ATTENTION = (
    EMBEDDING,
    Parameter("layers.attention_norm.scale", f"{_LAYER}input_layernorm.weight", ("features",)),
    *_KERNELS,
    *_BIASES,
    _head_norm("query_norm", "q_norm"),
    _head_norm("key_norm", "k_norm"),
    kernel("layers.attention.output.kernel", f"{_LAYER}self_attn.o_proj.weight",
           ("heads", "head_dim"), ("features",), sharded="heads", group=OUTPUT),
    Parameter("layers.attention.output.bias", f"{_LAYER}self_attn.o_proj.bias", ("features",),
              only_if=lambda config: config.output_bias),
    Parameter("layers.attention.sinks", f"{_LAYER}self_attn.sinks", ("heads",), sharded="heads",
              only_if=lambda config: config.attention_sinks),
    Parameter("layers.feed_forward_norm.scale", f"{_LAYER}post_attention_layernorm.weight",
              ("features",)),
)  # fmt: skip
_FEED_FORWARD: dict[str, Any] = {"sharded": "hidden", "group": FEED_FORWARD}
HEAD = kernel(
    "head.kernel", "lm_head.weight", ("features",), ("vocabulary",), sharded="vocabulary",
    role="vocabulary", group=LANGUAGE_HEAD, only_if=lambda config: not config.tied_head,
)  # fmt: skip
#: What every family has after its layers.
LAST = (Parameter("norm.scale", "model.norm.weight", ("features",)), HEAD)
#: The table of families without experts.
DENSE = (
    *ATTENTION,
    kernel("layers.feed_forward.gate.kernel", f"{_LAYER}mlp.gate_proj.weight",
           ("features",), ("hidden",), **_FEED_FORWARD),
    kernel("layers.feed_forward.up.kernel", f"{_LAYER}mlp.up_proj.weight",
           ("features",), ("hidden",), **_FEED_FORWARD),
    kernel("layers.feed_forward.down.kernel", f"{_LAYER}mlp.down_proj.weight",
           ("hidden",), ("features",), **_FEED_FORWARD),
    *LAST,
)  # fmt: skip
