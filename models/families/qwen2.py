"""Qwen2 and Qwen2.5: biases on queries, keys and values.

Source: Qwen Team, "Qwen2.5 Technical Report", 2024, and the published configurations.
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
from models.families.family import (
    COMMON_KEYS,
    WINDOW_KEYS,
    Family,
    Fields,
    window_keys,
    window_of_all_layers,
)
from models.families.parameter_table import DENSE


def qwen2_5_0_5b() -> LlamaConfig:
    """Qwen2.5 0.5B."""
    return _qwen(151_936, 24, 896, 4864, 14, 2, 64, tied_head=True)


def qwen2_5_7b() -> LlamaConfig:
    """Qwen2.5 7B."""
    return _qwen(152_064, 28, 3584, 18_944, 28, 4, 128)


def qwen2_5_72b() -> LlamaConfig:
    """Qwen2.5 72B."""
    return _qwen(152_064, 80, 8192, 29_568, 64, 8, 128)


def _qwen(*sizes: int, tied_head: bool = False) -> LlamaConfig:
    return LlamaConfig(
        *sizes,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        tied_head=tied_head,
        family="qwen2",
        projection_bias=True,
        context_length=32_768,
    )


_KEYS = merged(
    COMMON_KEYS,
    Key("vocab_size", SIZE, 151_936),
    Key("intermediate_size", SIZE, 22_016),
    # Null: as many as there are heads.
    Key("num_key_value_heads", or_null(SIZE), 32),
    Key("max_position_embeddings", SIZE, 32_768),
    # Hugging Face's library has no such keys for it. The biases belong to the family.
    Key("attention_bias", FLAG, True, supported=(True,)),
    Key("use_mrope", FLAG, False, supported=(False,)),
    Key("bos_token_id", or_null(TOKEN), None),
    Key("eos_token_id", or_null(TOKENS), None),
    *WINDOW_KEYS,
)


def _read(values: ConfigValues) -> Fields:
    return {"projection_bias": True, "sliding_window": window_of_all_layers(values)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return window_keys(config)


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _KEYS,
    _read,
    _write,
    {"qwen2.5-0.5b": qwen2_5_0_5b, "qwen2.5-7b": qwen2_5_7b, "qwen2.5-72b": qwen2_5_72b},
    DENSE,
)
