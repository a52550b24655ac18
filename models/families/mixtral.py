"""Mixtral: Mistral with experts in the place of the feed-forward.

Source: Jiang et al., "Mixtral of Experts", 2024, and the published configurations.
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
    fractions,
    merged,
    numbers,
    or_null,
)
from models.families.family import (
    COMMON_KEYS,
    EPSILON,
    EXPERT_KEYS,
    Family,
    Fields,
    expert_fields,
    expert_keys,
)
from models.families.parameter_table import ATTENTION, LAST, expert_kernels


def mixtral_8x7b() -> LlamaConfig:
    """Mixtral 8x7B v0.1."""
    return LlamaConfig(
        32_000, 32, 4096, 14_336, 32, 8, 128,
        rotary_base=1e6,
        family="mixtral",
        num_experts=8,
        num_experts_per_token=2,
        router_loss_weight=0.02,
        context_length=32_768,
    )  # fmt: skip


_KEYS = merged(
    COMMON_KEYS,
    *EXPERT_KEYS,
    Key("vocab_size", SIZE, 32_000),
    Key("intermediate_size", SIZE, 14_336),
    Key("num_key_value_heads", SIZE, 8),
    Key("max_position_embeddings", SIZE, 131_072),
    Key("rms_norm_eps", EPSILON, 1e-5),
    Key("rope_theta", numbers(1), 1e6),
    Key("attention_bias", FLAG, False, supported=(False,)),
    Key("sliding_window", or_null(SIZE), None),
    Key("num_local_experts", SIZE, 8),
    # Noise on the tokens of a router, which training here does not have.
    Key("router_jitter_noise", fractions(), 0.0, supported=(0.0,)),
    Key("bos_token_id", or_null(TOKEN), 1),
    Key("eos_token_id", or_null(TOKENS), 2),
)


def _read(values: ConfigValues) -> Fields:
    experts = expert_fields(values, values["num_local_experts"])
    return {"sliding_window": values["sliding_window"], **experts}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        "sliding_window": config.sliding_window,
        "num_local_experts": config.num_experts,
        **expert_keys(config),
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _KEYS,
    _read,
    _write,
    {"mixtral-8x7b": mixtral_8x7b},
    (
        *ATTENTION,
        *expert_kernels(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.{expert}.{matrix}.weight",
            gate="w1",
            up="w3",
            down="w2",
        ),
        *LAST,
    ),
)
