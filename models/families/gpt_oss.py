"""gpt-oss: experts with biases and a clamped activation, attention with sinks, and a sliding window
in every second layer.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and the published configurations.
"""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig, RotaryScaling
from models.families.config_keys import (
    FLAG,
    OBJECT,
    SIZE,
    TEXTS,
    TOKEN,
    TOKENS,
    ConfigValues,
    Key,
    Kind,
    merged,
    numbers,
    or_null,
    shown,
)
from models.families.family import (
    COMMON_KEYS,
    EPSILON,
    EXPERT_KEYS,
    LAYERS,
    Family,
    Fields,
    expert_fields,
    expert_keys,
    layer_kinds,
    written_kinds,
)
from models.families.parameter_table import (
    ATTENTION,
    EXPERTS,
    LAST,
    Dimensions,
    Parameter,
    Role,
    kernel,
)

#: What a file means that says nothing of it.
_YARN = RotaryScaling(kind="yarn", factor=32.0, original_context=4096, truncate=False)


def gpt_oss_20b() -> LlamaConfig:
    """gpt-oss-20b."""
    return _gpt_oss(layers=24, experts=32)


def gpt_oss_120b() -> LlamaConfig:
    """gpt-oss-120b."""
    return _gpt_oss(layers=36, experts=128)


def _gpt_oss(layers: int, experts: int) -> LlamaConfig:
    return LlamaConfig(
        201_088, layers, 2880, 2880, 64, 8, 64,
        rotary_base=150_000.0,
        rotary_scaling=_YARN,
        family="gpt_oss",
        projection_bias=True,
        output_bias=True,
        attention_sinks=True,
        sliding_window=128,
        full_attention_period=2,
        num_experts=experts,
        num_experts_per_token=4,
        expert_bias=True,
        expert_activation="gpt_oss",
        router_loss_weight=0.9,
        context_length=131_072,
    )  # fmt: skip


_DECIMAL = Kind("a number with a decimal point", lambda value: isinstance(value, float))
_KEYS = merged(
    COMMON_KEYS,
    *EXPERT_KEYS,
    Key("vocab_size", SIZE, 201_088),
    Key("hidden_size", SIZE, 2880),
    Key("intermediate_size", SIZE, 2880),
    Key("num_hidden_layers", LAYERS, 36),
    Key("num_attention_heads", SIZE, 64),
    Key("num_key_value_heads", SIZE, 8),
    Key("head_dim", SIZE, 64),
    Key("max_position_embeddings", SIZE, 131_072),
    Key("rms_norm_eps", EPSILON, 1e-5),
    Key("rope_theta", numbers(1), 150_000.0),
    Key("attention_bias", FLAG, True),
    Key("sliding_window", or_null(SIZE), 128),
    Key("layer_types", or_null(TEXTS), None),
    Key("num_local_experts", SIZE, 128),
    Key("num_experts_per_tok", SIZE, 4),
    Key("swiglu_alpha", _DECIMAL, 1.702, supported=(1.702,)),
    Key("swiglu_limit", _DECIMAL, 7.0, supported=(7.0,)),
    # Hugging Face's library does not read these two, of which it has other names.
    Key("experts_per_token", or_null(SIZE), None),
    Key("initial_context_length", or_null(SIZE), None),
    # How the tensors of experts are stored, which the tensors say themselves.
    Key("quantization_config", or_null(OBJECT), None),
    Key("bos_token_id", or_null(TOKEN), None),
    Key("eos_token_id", or_null(TOKENS), None),
)


def _read(values: ConfigValues) -> Fields:
    _check_quantization(values)
    window, period = layer_kinds(values)
    fields = dict(
        projection_bias=values["attention_bias"],
        output_bias=values["attention_bias"],
        attention_sinks=True,
        sliding_window=window,
        full_attention_period=period,
        expert_bias=True,
        expert_activation="gpt_oss",
        **expert_fields(values, values["num_local_experts"]),
    )
    if values["rope_parameters"] is None and not values["rope_scaling"]:
        fields["rotary_scaling"] = _YARN
    return fields


def _check_quantization(values: ConfigValues) -> None:
    """Raises ValueError for tensors that are stored in another way than the published ones."""
    stored = values["quantization_config"] or {}
    if stored and stored.get("quant_method") != "mxfp4":
        raise ValueError(
            f"config.json: quantization_config={shown(stored)}: expected a quant_method of 'mxfp4';"
            " give a model whose tensors are in that format, or not quantized"
        )


def _write(config: LlamaConfig) -> dict[str, Any]:
    # A file that has no scaling stands for the published one.
    base, scaled = float(config.rotary_base), config.rotary_scaling != RotaryScaling()
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    return {
        **({} if scaled else plain),
        "attention_bias": config.projection_bias,
        "num_local_experts": config.num_experts,
        **written_kinds(config),
        **expert_keys(config),
    }


def _of_experts(
    ours: str,
    theirs: str,
    inputs: Dimensions,
    outputs: Dimensions,
    turn: tuple[int, int] = (0, 1),
) -> Parameter:
    """One tensor of all experts of a layer. The columns of gate and up take turns."""
    role: Role = "expert" if inputs else "vector"
    path, tensor = f"layers.experts.{ours}", f"model.layers.{{layer}}.mlp.experts.{theirs}"
    return Parameter(
        path, tensor, outputs, inputs, ("experts",),
        sharded="experts", role=role, group=EXPERTS if inputs else None, turn=turn,
    )  # fmt: skip


_PARAMETERS = (
    *ATTENTION,
    kernel("layers.experts.router.kernel", "model.layers.{layer}.mlp.router.weight",
           ("features",), ("experts",), role="router"),
    Parameter("layers.experts.router.logit_bias", "model.layers.{layer}.mlp.router.bias",
              ("experts",)),
    _of_experts("w_gate", "gate_up_proj", ("features",), ("hidden",), (0, 2)),
    _of_experts("w_up", "gate_up_proj", ("features",), ("hidden",), (1, 2)),
    _of_experts("w_down", "down_proj", ("hidden",), ("features",)),
    _of_experts("b_gate", "gate_up_proj_bias", (), ("hidden",), (0, 2)),
    _of_experts("b_up", "gate_up_proj_bias", (), ("hidden",), (1, 2)),
    _of_experts("b_down", "down_proj_bias", (), ("features",)),
    *LAST,
)  # fmt: skip

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _KEYS,
    _read,
    _write,
    {"gpt-oss-20b": gpt_oss_20b, "gpt-oss-120b": gpt_oss_120b},
    _PARAMETERS,
)
