"""Mistral: attention within a sliding window, where the model has one.

Source: Jiang et al., "Mistral 7B", 2023, and the published configurations.
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
    merged,
    or_null,
)
from models.families.family import COMMON_KEYS, Family, Fields
from models.families.parameter_table import DENSE


def mistral_7b_v0_1() -> LlamaConfig:
    """Mistral 7B v0.1."""
    return _mistral(32_000, sliding_window=4096, rotary_base=10_000.0)


def mistral_7b_v0_3() -> LlamaConfig:
    """Mistral 7B v0.3."""
    return _mistral(32_768, sliding_window=None, rotary_base=1e6)


def _mistral(vocabulary_size: int, **others: Any) -> LlamaConfig:
    return LlamaConfig(
        vocabulary_size, 32, 4096, 14_336, 32, 8, 128,
        family="mistral", context_length=32_768, **others,
    )  # fmt: skip


_KEYS = merged(
    COMMON_KEYS,
    Key("vocab_size", SIZE, 32_000),
    Key("intermediate_size", SIZE, 14_336),
    Key("num_key_value_heads", SIZE, 8),
    Key("max_position_embeddings", SIZE, 131_072),
    Key("attention_bias", FLAG, False, supported=(False,)),
    Key("sliding_window", or_null(SIZE), 4096),
    Key("bos_token_id", or_null(TOKEN), 1),
    Key("eos_token_id", or_null(TOKENS), 2),
)


def _read(values: ConfigValues) -> Fields:
    return {"sliding_window": values["sliding_window"]}


def _write(config: LlamaConfig) -> dict[str, Any]:
    # A file without the key means a window of 4096.
    return {"sliding_window": config.sliding_window}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _KEYS,
    _read,
    _write,
    {"mistral-7b-v0.1": mistral_7b_v0_1, "mistral-7b-v0.3": mistral_7b_v0_3},
    DENSE,
)
