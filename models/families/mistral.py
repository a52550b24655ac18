"""Mistral: attention within a sliding window, where the model has one.

Source: Jiang et al., "Mistral 7B", 2023, and the published configurations.
"""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig
from models.families.config_keys import ConfigKeys
from models.families.family import Family, Fields


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


def _read(keys: ConfigKeys) -> Fields:
    return {"sliding_window": keys.take("sliding_window", None)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    # A file without the key means a window of 4096.
    return {"sliding_window": config.sliding_window}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _read,
    _write,
    {"mistral-7b-v0.1": mistral_7b_v0_1, "mistral-7b-v0.3": mistral_7b_v0_3},
)
