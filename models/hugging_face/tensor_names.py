"""How Hugging Face names and lays out the parameters of `models.llama.Llama`.

Its linear layers store [out, in], and ours [*in, *out]: the same matrix, transposed. Its files have
a tensor for each matrix of each expert, and our parameters those of all experts of a layer.
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
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    transposed: bool
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(map(math.prod, self.groups))

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

    A parameter of experts comes once for each expert, in order.
    """
    groups = _groups(config)

    def tensor(path: str, name: str, expert: int | None = None) -> Tensor:
        transposed = path.endswith((".kernel", *_EXPERT_PARAMETERS))
        return Tensor(name, groups[path], transposed, expert)

    yield "embedding", tensor("embedding", _WHOLE_MODEL["embedding"])
    for layer in range(config.num_layers):
        for path, name in _LAYER.items():
            if path in groups:
                yield f"layers.{layer}.{path}", tensor(path, f"model.layers.{layer}.{name}")
        for path, name, expert in _expert_names(config):
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
    for name, heads in (("query", query), ("key", key), ("value", key)):
        groups[f"attention.projection.{name}.kernel"] = heads, features
        if config.projection_bias:
            groups[f"attention.projection.{name}.bias"] = (heads,)
    if config.query_key_norm:
        groups |= {"attention.query_norm.scale": (head,), "attention.key_norm.scale": (head,)}
    if not config.tied_head:
        groups["head.kernel"] = vocabulary, features
    return groups
