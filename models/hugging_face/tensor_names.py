"""How Hugging Face names and lays out the parameters of `models.llama.Llama`.

Its linear layers store [out, in], and ours [*in, *out]: the same matrix, transposed. Its files have
a tensor for each matrix of each expert, and our parameters those of all experts of a layer; but in
files of gpt-oss one tensor has gate and up of all experts, whose columns take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from models.config import LlamaConfig

Index = tuple[slice, ...]

_LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.projection.query.kernel": "self_attn.q_proj.weight",
    "attention.projection.key.kernel": "self_attn.k_proj.weight",
    "attention.projection.value.kernel": "self_attn.v_proj.weight",
    "attention.projection.query.bias": "self_attn.q_proj.bias",
    "attention.projection.key.bias": "self_attn.k_proj.bias",
    "attention.projection.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
    "attention.output.kernel": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.sinks": "self_attn.sinks",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    "feed_forward.gate.kernel": "mlp.gate_proj.weight",
    "feed_forward.up.kernel": "mlp.up_proj.weight",
    "feed_forward.down.kernel": "mlp.down_proj.weight",
}
#: By family with experts: the router, and of each expert gate, up and down. The second is a format
#: of the expert's number.
_EXPERTS = {
    "mixtral": (
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.experts.{}.{}.weight",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        "mlp.gate.weight",
        "mlp.experts.{}.{}.weight",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
_EXPERT_PARAMETERS = ("experts.w_gate", "experts.w_up", "experts.w_down")
#: Of gpt-oss: each parameter, its tensor, and the place of its columns in turns of several.
_GPT_OSS: tuple[tuple[str, str, tuple[int, int]], ...] = (
    ("experts.router.kernel", "mlp.router.weight", (0, 1)),
    ("experts.router.logit_bias", "mlp.router.bias", (0, 1)),
    ("experts.w_gate", "mlp.experts.gate_up_proj", (0, 2)),
    ("experts.w_up", "mlp.experts.gate_up_proj", (1, 2)),
    ("experts.w_down", "mlp.experts.down_proj", (0, 1)),
    ("experts.b_gate", "mlp.experts.gate_up_proj_bias", (0, 2)),
    ("experts.b_up", "mlp.experts.gate_up_proj_bias", (1, 2)),
    ("experts.b_down", "mlp.experts.down_proj_bias", (0, 1)),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WHOLE_MODEL = {"embedding": EMBEDDING, "norm.scale": "model.norm.weight", "head.kernel": HEAD}


class Tensor(NamedTuple):
    """A tensor of a file, and the parameter that it is, or a part of it.

    Attributes:
      name: its name in the file.
      groups: for each dimension of the tensor, the sizes of the dimensions of the parameter that
        it consists of.
      transposed: whether the parameter has the groups in the opposite order.
      expert: the place of the tensor in a parameter that has a first dimension of experts; None if
        the tensor is all of it.
      turn: which columns of the tensor are the parameter's, and in turns of how many: (1, 2) are
        every second one. The other columns are those of other parameters.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    transposed: bool
    expert: int | None = None
    turn: tuple[int, int] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        *sizes, columns = map(math.prod, self.groups)
        return *sizes, columns * self.turn[1]

    @property
    def parameter_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups in the order of the parameter."""
        return self.groups[::-1] if self.transposed else self.groups

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, without padding; of one expert's part of it."""
        return tuple(itertools.chain(*self.parameter_groups))


def tensors(config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """The name of every parameter of a model whose layers are not stacked, and its tensor.

    A parameter of experts comes once for each expert, in order. Parameters of which one tensor has
    all follow each other, in the order of their turns.
    """
    groups, of_one_expert = _groups(config), config.family != "gpt_oss"

    def tensor(path: str, name: str, expert: int | None = None) -> Tensor:
        matrices = _EXPERT_PARAMETERS if of_one_expert else ()
        return Tensor(name, groups[path], path.endswith((".kernel", *matrices)), expert)

    yield "embedding", tensor("embedding", _WHOLE_MODEL["embedding"])
    for layer in range(config.num_layers):
        for path, name in _LAYER.items():
            if path in groups:
                yield f"layers.{layer}.{path}", tensor(path, f"model.layers.{layer}.{name}")
        for path, name, turn in () if of_one_expert else _GPT_OSS:
            own = tensor(path, f"model.layers.{layer}.{name}")
            yield f"layers.{layer}.{path}", own._replace(turn=turn)
        for path, name, expert in _expert_names(config) if of_one_expert else ():
            own = tensor(path, f"model.layers.{layer}.{name}", expert)
            yield f"layers.{layer}.{path}", own
    for path in ("norm.scale", "head.kernel"):
        if path in groups:
            yield path, tensor(path, _WHOLE_MODEL[path])


def _expert_names(config: LlamaConfig) -> Iterator[tuple[str, str, int | None]]:
    """The parameters of a layer's router and experts, their tensors, and the experts' numbers."""
    if config.num_experts is None:
        return
    router, each, matrices = _EXPERTS.get(config.family, _EXPERTS["qwen3_moe"])
    yield "experts.router.kernel", router, None
    for path, matrix in zip(_EXPERT_PARAMETERS, matrices, strict=True):
        for expert in range(config.num_experts):
            yield path, each.format(expert, matrix), expert


def _groups(config: LlamaConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """`Tensor.groups` of each parameter that the model has, by its path."""
    features, hidden = (config.features,), (config.hidden_features,)
    vocabulary, head = (config.vocabulary_size,), (config.head_dim,)
    query = config.num_heads, config.head_dim
    key = config.num_key_value_heads, config.head_dim
    groups = {
        "embedding": (vocabulary, features),
        "attention_norm.scale": (features,),
        "feed_forward_norm.scale": (features,),
        "norm.scale": (features,),
        "attention.output.kernel": (features, query),
    }
    names = [f"feed_forward.{name}.kernel" for name in ("gate", "up", "down")]
    if config.num_experts is not None:
        groups["experts.router.kernel"] = (config.num_experts,), features
        names = list(_EXPERT_PARAMETERS)
    groups |= zip(names, ((hidden, features), (hidden, features), (features, hidden)), strict=True)
    if config.family == "gpt_oss":
        groups |= _groups_of_gpt_oss(config)
    for name, heads in (("query", query), ("key", key), ("value", key)):
        groups[f"attention.projection.{name}.kernel"] = heads, features
        if config.projection_bias:
            groups[f"attention.projection.{name}.bias"] = (heads,)
    if config.output_bias:
        groups["attention.output.bias"] = (features,)
    if config.attention_sinks:
        groups["attention.sinks"] = ((config.num_heads,),)
    if config.query_key_norm:
        groups |= {"attention.query_norm.scale": (head,), "attention.key_norm.scale": (head,)}
    if not config.tied_head:
        groups["head.kernel"] = vocabulary, features
    return groups


def _groups_of_gpt_oss(config: LlamaConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The same of its experts, whose tensors have all of a layer and are not transposed."""
    assert config.num_experts is not None
    experts, features = (config.num_experts,), (config.features,)
    hidden = (config.hidden_features,)
    return {
        "experts.router.logit_bias": (experts,),
        "experts.w_gate": (experts, features, hidden),
        "experts.w_up": (experts, features, hidden),
        "experts.w_down": (experts, hidden, features),
        "experts.b_gate": (experts, hidden),
        "experts.b_up": (experts, hidden),
        "experts.b_down": (experts, features),
    }
