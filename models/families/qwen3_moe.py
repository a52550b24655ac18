"""Qwen3-MoE: Qwen3 with experts in the place of the feed-forward.

Source: Qwen Team, "Qwen3 Technical Report", 2025, and the published configurations.
"""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig
from models.families.config_keys import (
    FLAG,
    SIZE,
    TOKEN,
    TOKENS,
    ConfigValues,
    Key,
    integers,
    lists,
    merged,
    or_null,
    shown,
)
from models.families.family import (
    COMMON_KEYS,
    EXPERT_KEYS,
    LAYERS,
    Family,
    Fields,
    expert_fields,
    expert_keys,
)
from models.families.parameter_table import ATTENTION, LAST, expert_kernels


def qwen3_30b_a3b() -> LlamaConfig:
    """Qwen3 30B-A3B."""
    return LlamaConfig(
        151_936, 48, 2048, 768, 32, 4, 128,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        family="qwen3_moe",
        query_key_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        router_loss_weight=0.001,
        context_length=40_960,
    )  # fmt: skip


_KEYS = merged(
    COMMON_KEYS,
    *EXPERT_KEYS,
    Key("vocab_size", SIZE, 151_936),
    Key("hidden_size", SIZE, 2048),
    Key("num_hidden_layers", LAYERS, 24),
    # The feed-forward of layers that have no experts, of which there are none.
    Key("intermediate_size", SIZE, 6144),
    Key("moe_intermediate_size", SIZE, 768),
    Key("num_key_value_heads", SIZE, 4),
    Key("max_position_embeddings", SIZE, 32_768),
    # Hugging Face's library takes null for a number, and fails.
    Key("head_dim", SIZE, None),
    Key("attention_bias", FLAG, False, supported=(False,)),
    Key("num_experts", SIZE, 128),
    # The name that Hugging Face's library writes since version 5.
    Key("num_local_experts", SIZE, 128),
    Key("num_experts_per_tok", SIZE, 8),
    Key("norm_topk_prob", FLAG, False),
    Key("decoder_sparse_step", SIZE, 1),
    Key("mlp_only_layers", or_null(lists(integers(0), "a list of integers")), None),
    Key("use_sliding_window", FLAG, False),
    Key("sliding_window", or_null(SIZE), 4096),
    # Hugging Face's library has no such key for it any more.
    Key("max_window_layers", or_null(integers(0)), None),
    Key("bos_token_id", or_null(TOKEN), None),
    Key("eos_token_id", or_null(TOKENS), None),
)


def _read(values: ConfigValues) -> Fields:
    _check_layers(values)
    return {
        "query_key_norm": True,
        "hidden_features": values["moe_intermediate_size"],
        "normalize_expert_weights": values["norm_topk_prob"],
        "sliding_window": _window(values),
        **expert_fields(values, _number_of_experts(values)),
    }


def _check_layers(values: ConfigValues) -> None:
    """Raises ValueError if there are layers without experts."""
    dense, step = values["mlp_only_layers"] or [], values["decoder_sparse_step"]
    layers = range(values["num_hidden_layers"])
    if step > 1 or set(dense) & set(layers):
        raise ValueError(
            f"config.json: decoder_sparse_step={step} and mlp_only_layers={shown(dense)}: some"
            " layers have experts and others have none, which is not supported; expected 1 and []"
        )


def _number_of_experts(values: ConfigValues) -> int:
    """The number of experts, by either of its names."""
    old, new = "num_experts", "num_local_experts"
    if values.has(old) and values.has(new) and values[old] != values[new]:
        raise ValueError(
            f"config.json: {old}={values[old]} and {new}={values[new]} are two names of one number;"
            " give the file that the model came with"
        )
    return values[new] if values.has(new) else values[old]


def _window(values: ConfigValues) -> int | None:
    """The sliding window, which all layers have or none."""
    if not values["use_sliding_window"] or values["sliding_window"] is None:
        return None
    if values["max_window_layers"]:
        raise ValueError(
            f"config.json: max_window_layers={values['max_window_layers']} with"
            " use_sliding_window=True: releases of Hugging Face's library differ in which layers"
            " then have a sliding window; set max_window_layers to 0 for all of them"
        )
    return values["sliding_window"]


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "moe_intermediate_size": config.hidden_features,
        # The name that all releases of Hugging Face's library read.
        "num_experts": config.num_experts,
        "norm_topk_prob": config.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **expert_keys(config),
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _KEYS,
    _read,
    _write,
    {"qwen3-30b-a3b": qwen3_30b_a3b},
    (
        *ATTENTION,
        *expert_kernels(
            "mlp.gate.weight",
            "mlp.experts.{expert}.{matrix}.weight",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
        ),
        *LAST,
    ),
)
