"""What all families share: the common keys of config.json, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.config import LlamaConfig, RotaryScaling
from models.families.config_keys import ConfigKeys

Fields = dict[str, Any]
Presets = Mapping[str, Callable[[], LlamaConfig]]


@dataclass(frozen=True)
class Family:
    """A family of models that differ from Llama in a few fields.

    Attributes:
      name: its name here, and `model_type` in config.json.
      architecture: the class in Hugging Face's library.
      read: the fields of `LlamaConfig` that differ from Llama's, from the keys of config.json; it
        refuses values of its own keys that are not supported.
      write: its own keys of config.json.
      presets: its published models by name.
    """

    name: str
    architecture: str
    read: Callable[[ConfigKeys], Fields]
    write: Callable[[LlamaConfig], dict[str, Any]]
    presets: Presets


def common_fields(keys: ConfigKeys) -> Fields:
    """The fields that every family has."""
    keys.expect("hidden_act", "silu")
    # Dropout of attention weights, which training here does not have.
    keys.expect("attention_dropout", 0.0)
    features, heads = keys.take("hidden_size"), keys.take("num_attention_heads")
    vocabulary_size = keys.take("vocab_size")
    base, scaling = _rotary(keys)
    return dict(
        vocabulary_size=vocabulary_size,
        num_layers=keys.take("num_hidden_layers"),
        features=features,
        hidden_features=keys.take("intermediate_size"),
        num_heads=heads,
        num_key_value_heads=keys.take("num_key_value_heads", heads),
        head_dim=keys.take("head_dim", features // heads),
        rotary_base=base,
        rotary_scaling=scaling,
        norm_epsilon=keys.take("rms_norm_eps", 1e-6),
        tied_head=keys.take("tie_word_embeddings", False),
        context_length=keys.take("max_position_embeddings", None),
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
        "rope_theta": config.rotary_base,
        "rope_scaling": _scaling_key(config.rotary_scaling),
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
        **({"max_position_embeddings": config.context_length} if config.context_length else {}),
    }


def window_of_all_layers(keys: ConfigKeys) -> int | None:
    """The sliding window of models that may have one in some layers, which is not supported.

    Raises:
      ValueError: if some layers have a window and others have none.
    """
    window = keys.take("sliding_window", None)
    layers = keys.take("num_hidden_layers")
    without = keys.take("max_window_layers", 0)
    kinds = keys.take("layer_types", None)
    if not keys.take("use_sliding_window", False):
        window = None
    if kinds is None:
        number = 0 if window is None else max(layers - without, 0)
        kinds = ["sliding_attention"] * number + ["full_attention"] * (layers - number)
    if len(set(kinds)) > 1 or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            "config.json: layers differ in layer_types or by max_window_layers; expected a sliding"
            " window in all layers or in none"
        )
    return window if kinds[0] == "sliding_attention" else None


def window_keys(config: LlamaConfig) -> dict[str, Any]:
    """The keys of which `window_of_all_layers` reads a window."""
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if config.sliding_window else config.num_layers,
    }


def _rotary(keys: ConfigKeys) -> tuple[float, RotaryScaling]:
    """The base of rotary embedding and its scaling, of old and of new config.json files."""
    old = keys.take("rope_scaling", {})
    parameters = ConfigKeys({**old, **keys.take("rope_parameters", {})})
    base = keys.take("rope_theta", 10_000.0)
    base = parameters.take("rope_theta", base)
    parameters.expect("partial_rotary_factor", 1.0)
    kind = parameters.take("rope_type", parameters.take("type", "default"))
    if kind == "default":
        scaling = RotaryScaling()
    elif kind == "llama3":
        scaling = RotaryScaling(
            factor=parameters.take("factor"),
            low_frequency_factor=parameters.take("low_freq_factor"),
            high_frequency_factor=parameters.take("high_freq_factor"),
            original_context=parameters.take("original_max_position_embeddings"),
        )
    else:
        raise ValueError(
            f"config.json: rope_scaling of type {kind!r} is not supported; expected 'llama3', or"
            " null for none"
        )
    parameters.finish()
    return base, scaling


def _scaling_key(scaling: RotaryScaling) -> dict[str, Any] | None:
    if scaling.factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
