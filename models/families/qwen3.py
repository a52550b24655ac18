"""Qwen3: norms on the heads of queries and keys, whose size is not features / heads.

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


def qwen3_0_6b() -> LlamaConfig:
    """Qwen3 0.6B."""
    return _qwen(28, 1024, 3072, 16, tied_head=True)


def qwen3_8b() -> LlamaConfig:
    """Qwen3 8B."""
    return _qwen(36, 4096, 12_288, 32)


def qwen3_32b() -> LlamaConfig:
    """Qwen3 32B."""
    return _qwen(64, 5120, 25_600, 64)


def _qwen(
    layers: int, features: int, hidden: int, heads: int, *, tied_head: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        151_936, layers, features, hidden, heads, 8, 128,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        tied_head=tied_head,
        family="qwen3",
        query_key_norm=True,
        context_length=40_960,
    )  # fmt: skip


_KEYS = merged(
    COMMON_KEYS,
    Key("vocab_size", SIZE, 151_936),
    Key("intermediate_size", SIZE, 22_016),
    # Null: as many as there are heads.
    Key("num_key_value_heads", or_null(SIZE), 32),
    Key("max_position_embeddings", SIZE, 32_768),
    Key("head_dim", SIZE, 128),
    Key("attention_bias", FLAG, False, supported=(False,)),
    Key("bos_token_id", or_null(TOKEN), None),
    Key("eos_token_id", or_null(TOKENS), None),
    *WINDOW_KEYS,
)


def _read(values: ConfigValues) -> Fields:
    return {"query_key_norm": True, "sliding_window": window_of_all_layers(values)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": False, **window_keys(config)}


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _KEYS,
    _read,
    _write,
    {"qwen3-0.6b": qwen3_0_6b, "qwen3-8b": qwen3_8b, "qwen3-32b": qwen3_32b},
    DENSE,
)
