"""Qwen3: norms on the heads of queries and keys, whose size is not features / heads.

Source: Qwen Team, "Qwen3 Technical Report", 2025, and the published configurations.
"""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig
from models.families.config_keys import ConfigKeys
from models.families.family import Family, Fields, window_keys, window_of_all_layers


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


def _read(keys: ConfigKeys) -> Fields:
    keys.expect("attention_bias", False)
    return {
        "query_key_norm": True,
        "head_dim": keys.take("head_dim", 128),
        "sliding_window": window_of_all_layers(keys),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": False, **window_keys(config)}


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read,
    _write,
    {"qwen3-0.6b": qwen3_0_6b, "qwen3-8b": qwen3_8b, "qwen3-32b": qwen3_32b},
)
