"""Shared by all families: the common keys of config.json, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.config import LlamaConfig
from models.families.config_keys import (
    FLAG,
    SIZE,
    TEXT,
    TEXTS,
    TOKEN,
    ConfigValues,
    Key,
    fractions,
    integers,
    numbers,
    or_null,
    shown,
)
from models.families.parameter_table import Parameter
from models.families.rotary_keys import ROTARY_KEYS, read_rotary, write_rotary

Fields = dict[str, Any]
Presets = Mapping[str, Callable[[], LlamaConfig]]


@dataclass(frozen=True)
class Family:
    """A family of models that differ from Llama in a few fields.

    Attributes:
      name: its name here, and `model_type` in config.json.
      architecture: the class in Hugging Face's library.
      keys: the keys of its config.json.
      read: the fields of `LlamaConfig` that differ from Llama's, from the values of its keys.
      write: its own keys of config.json.
      presets: its published models by name.
      parameters: its table, in the order of its files.
    """

    name: str
    architecture: str
    keys: tuple[Key, ...]
    read: Callable[[ConfigValues], Fields]
    write: Callable[[LlamaConfig], dict[str, Any]]
    presets: Presets
    parameters: tuple[Parameter, ...]


#: A number of layers that no model has ends in a sentence rather than in an endless loop.
LAYERS = integers(1, 10_000)
#: Less is 0 in float32, and a row of zeros then becomes NaN.
EPSILON = fractions(1e-30)

COMMON_KEYS = (
    Key("architectures", or_null(TEXTS), None),
    Key("model_type", TEXT, None),
    # Both names of the dtype of the tensors, which the tensors say themselves.
    Key("dtype", or_null(TEXT), None),
    Key("torch_dtype", or_null(TEXT), None),
    Key("hidden_size", SIZE, 4096),
    Key("num_hidden_layers", LAYERS, 32),
    Key("num_attention_heads", SIZE, 32),
    # Null: hidden_size / num_attention_heads.
    Key("head_dim", or_null(SIZE), None),
    Key("hidden_act", TEXT, "silu", supported=("silu", "swish")),
    Key("rms_norm_eps", EPSILON, 1e-6),
    Key("tie_word_embeddings", FLAG, False),
    # Dropout of attention weights, which training here does not have.
    Key("attention_dropout", numbers(0, 1), 0.0, supported=(0.0,)),
    Key("mlp_bias", FLAG, False, supported=(False,)),
    Key("use_cache", FLAG, True),
    Key("initializer_range", fractions(), 0.02),
    Key("pad_token_id", or_null(TOKEN), None),
    # Matrices were multiplied in parts, with the same result.
    Key("pretraining_tp", or_null(integers(0)), 1),
    *ROTARY_KEYS,
)


def common_fields(values: ConfigValues) -> Fields:
    """The fields that every family has.

    Raises:
      ValueError: for values that do not go together.
    """
    features, heads = values["hidden_size"], values["num_attention_heads"]
    key_value_heads = values["num_key_value_heads"] or heads
    context = values["max_position_embeddings"]
    head_dim = values["head_dim"] or features // heads
    if heads % key_value_heads:
        raise ValueError(
            f"config.json: num_attention_heads={heads} is not a multiple of"
            f" num_key_value_heads={key_value_heads}; give the file that the model came with"
        )
    if not head_dim or head_dim % 2:
        raise ValueError(
            f"config.json: heads of {head_dim} features, by head_dim={values['head_dim']},"
            f" hidden_size={features} and num_attention_heads={heads}: expected a positive even"
            " number, since the rotary embedding turns pairs"
        )
    base, scaling = read_rotary(values, context)
    return dict(
        vocabulary_size=values["vocab_size"],
        num_layers=values["num_hidden_layers"],
        features=features,
        hidden_features=values["intermediate_size"],
        num_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary_base=float(base),
        rotary_scaling=scaling,
        norm_epsilon=values["rms_norm_eps"],
        tied_head=values["tie_word_embeddings"],
        # Limits prompts; the numbers do not depend on it. A file may leave it open.
        context_length=context if values.has("max_position_embeddings") else None,
    )


def common_keys(config: LlamaConfig) -> dict[str, Any]:
    """The keys of config.json that every family has."""
    return {
        "hidden_act": "silu",
        "vocab_size": config.vocabulary_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.features,
        "intermediate_size": config.hidden_features,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        **write_rotary(config.rotary_base, config.rotary_scaling),
        "rms_norm_eps": float(config.norm_epsilon),
        "tie_word_embeddings": config.tied_head,
        # A file without them names tokens of Llama 2.
        "bos_token_id": None,
        "eos_token_id": None,
        **({"max_position_embeddings": config.context_length} if config.context_length else {}),
    }


WINDOW_KEYS = (
    Key("use_sliding_window", FLAG, False),
    Key("sliding_window", or_null(SIZE), 4096),
    Key("max_window_layers", integers(0), 28),
    Key("layer_types", or_null(TEXTS), None),
)
_WINDOW, _FULL = "sliding_attention", "full_attention"


def window_of_all_layers(values: ConfigValues) -> int | None:
    """The sliding window of models that may have one in some layers, which is not supported.

    Raises:
      ValueError: if some layers have a window and others have none.
    """
    layers, window = values["num_hidden_layers"], values["sliding_window"]
    if not values["use_sliding_window"]:
        window = None
    kinds = values["layer_types"]
    if kinds is None:
        full = layers if window is None else min(values["max_window_layers"], layers)
        kinds = [_FULL] * full + [_WINDOW] * (layers - full)
    kinds = _kinds_of_all(kinds, layers)
    if len(set(kinds)) > 1 or set(kinds) - {_WINDOW, _FULL}:
        raise ValueError(
            "config.json: layers differ in layer_types or by max_window_layers; expected a sliding"
            " window in all layers or in none"
        )
    if kinds[0] == _FULL:
        return None
    if window is None:
        raise ValueError(
            "config.json: layer_types asks for sliding_attention, and"
            f" use_sliding_window={values['use_sliding_window']} with"
            f" sliding_window={values['sliding_window']} for none; set both, or layer_types to"
            " full_attention"
        )
    return window


def _kinds_of_all(kinds: list[str], layers: int) -> list[str]:
    """The kind of each layer, by its present name.

    Raises:
      ValueError: if there are more or fewer.
    """
    if len(kinds) != layers:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={layers};"
            " give the file that the model came with"
        )
    # An older name.
    return [_FULL if kind == "attention" else kind for kind in kinds]


def layer_kinds(values: ConfigValues) -> tuple[int | None, int | None]:
    """`sliding_window` and `full_attention_period` of models whose layers take turns.

    Without `layer_types`, every second layer has no window.

    Raises:
      ValueError: for other turns than some layers with a window and then one without.
    """
    layers, window = values["num_hidden_layers"], values["sliding_window"]
    kinds = values["layer_types"]
    if kinds is None:
        kinds = [_FULL if number % 2 else _WINDOW for number in range(layers)]
    kinds = _kinds_of_all(kinds, layers)
    if set(kinds) == {_FULL}:
        return None, None
    period = kinds.index(_FULL) + 1 if _FULL in kinds else None
    if kinds != _turns(layers, period):
        raise ValueError(
            f"config.json: layer_types={shown(kinds)}: expected layers of sliding_attention with a"
            " layer of full_attention after each equal number of them"
        )
    if window is None:
        raise ValueError(
            "config.json: layer_types asks for sliding_attention, and sliding_window=None for none;"
            " set it, or layer_types to full_attention"
        )
    return window, period


def written_kinds(config: LlamaConfig) -> dict[str, Any]:
    """The keys of which `layer_kinds` reads those of a model."""
    layers, period = config.num_layers, config.full_attention_period
    if config.sliding_window is None:
        period = 1
    return {
        "sliding_window": config.sliding_window,
        "layer_types": _turns(layers, period),
    }


def _turns(layers: int, period: int | None) -> list[str]:
    """The kind of each layer, of which the last of each period has no window."""
    return [_FULL if period and (n + 1) % period == 0 else _WINDOW for n in range(layers)]


def window_keys(config: LlamaConfig) -> dict[str, Any]:
    """The keys of which `window_of_all_layers` reads a window."""
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if config.sliding_window else config.num_layers,
    }


EXPERT_KEYS = (
    Key("num_experts_per_tok", SIZE, 2),
    Key("router_aux_loss_coef", fractions(), 0.001),
    # Whether answers of Hugging Face's library have the router's numbers, and its loss their share.
    Key("output_router_logits", FLAG, False),
)


def expert_fields(values: ConfigValues, experts: int) -> Fields:
    """The fields that every family with experts has.

    Args:
      values: the values of the family's keys.
      experts: the number of experts.

    Raises:
      ValueError: if there are fewer experts than a token is sent to.
    """
    chosen = values["num_experts_per_tok"]
    if chosen > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} is more than the number of experts,"
            f" {experts}; give the file that the model came with"
        )
    return dict(
        num_experts=experts,
        num_experts_per_token=chosen,
        router_loss_weight=values["router_aux_loss_coef"],
    )


def expert_keys(config: LlamaConfig) -> dict[str, Any]:
    """The keys that `expert_fields` reads; those of the number of experts are the family's."""
    return {
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": float(config.router_loss_weight),
    }
