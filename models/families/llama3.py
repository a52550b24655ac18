"""Llama 3, 3.1 and 3.2: what `LlamaConfig` describes by default.

Source: Llama Team, "The Llama 3 Herd of Models", 2024, and the published configurations.
"""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig, RotaryScaling
from models.families.config_keys import (
    FLAG,
    SIZE,
    TOKEN,
    TOKENS,
    ConfigValues,
    Key,
    merged,
    numbers,
    or_null,
)
from models.families.family import COMMON_KEYS, Family, Fields
from models.families.parameter_table import DENSE

_STRETCHED = RotaryScaling(factor=8.0)
_STRETCHED_FURTHER = RotaryScaling(factor=32.0)


def llama3_8b() -> LlamaConfig:
    """Llama 3.1 8B."""
    return _llama(32, 4096, 14_336, 32)


def llama3_70b() -> LlamaConfig:
    """Llama 3.1 70B."""
    return _llama(80, 8192, 28_672, 64)


def llama3_405b() -> LlamaConfig:
    """Llama 3.1 405B."""
    return _llama(126, 16_384, 53_248, 128)


def llama3_2_1b() -> LlamaConfig:
    """Llama 3.2 1B."""
    return _llama(16, 2048, 8192, 32, 64, rotary_scaling=_STRETCHED_FURTHER, tied_head=True)


def llama3_2_3b() -> LlamaConfig:
    """Llama 3.2 3B."""
    return _llama(28, 3072, 8192, 24, rotary_scaling=_STRETCHED_FURTHER, tied_head=True)


def _llama(
    layers: int, features: int, hidden: int, heads: int, head_dim: int = 128, **others: Any
) -> LlamaConfig:
    fields: dict[str, Any] = dict(rotary_scaling=_STRETCHED, context_length=131_072) | others
    return LlamaConfig(128_256, layers, features, hidden, heads, 8, head_dim, **fields)


_KEYS = merged(
    COMMON_KEYS,
    Key("vocab_size", SIZE, 32_000),
    Key("intermediate_size", SIZE, 11_008),
    # Null: as many as there are heads.
    Key("num_key_value_heads", or_null(SIZE), None),
    Key("max_position_embeddings", SIZE, 2048),
    Key("attention_bias", FLAG, False, supported=(False,)),
    Key("attention_dropout", or_null(numbers(0, 1)), 0.0, supported=(0.0, None)),
    # Hugging Face's library has no such key for it.
    Key("rope_interleaved", FLAG, False, supported=(False,)),
    Key("bos_token_id", or_null(TOKEN), 1),
    Key("eos_token_id", or_null(TOKENS), 2),
)


def _read(values: ConfigValues) -> Fields:
    features, heads = values["hidden_size"], values["num_attention_heads"]
    if features % heads:
        raise ValueError(
            f"config.json: hidden_size={features} is not a multiple of"
            f" num_attention_heads={heads}; give the file that the model came with"
        )
    return {}


def _write(config: LlamaConfig) -> dict[str, Any]:
    del config
    return {"attention_bias": False, "mlp_bias": False}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _KEYS,
    _read,
    _write,
    {
        "llama3-8b": llama3_8b,
        "llama3-70b": llama3_70b,
        "llama3-405b": llama3_405b,
        "llama3.2-1b": llama3_2_1b,
        "llama3.2-3b": llama3_2_3b,
    },
    DENSE,
)
