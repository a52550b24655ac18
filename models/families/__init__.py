"""Families of Llama-style models: one file of differences each, and what config.json calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.config import LlamaConfig, debug
from models.families.config_keys import ConfigKeys
from models.families.family import common_fields, common_keys
from models.families.llama3 import LLAMA
from models.families.mistral import MISTRAL
from models.families.qwen2 import QWEN2
from models.families.qwen3 import QWEN3

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}

#: The shapes of published models, and of one for a laptop, by name.
PRESETS: dict[str, Callable[[], LlamaConfig]] = {"debug": debug}
for _family in FAMILIES.values():
    PRESETS |= _family.presets


def read_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The shape of the model that a Hugging Face config.json describes.

    Args:
      values: its contents.

    Raises:
      ValueError: for an unknown architecture, a missing key, or a key or value that changes what
        the model computes and that is not known; the message names it.
    """
    architecture = (values.get("architectures") or [None])[0]
    found = [f for f in FAMILIES.values() if values.get("model_type") == f.name]
    known = ", ".join(family.architecture for family in FAMILIES.values())
    if not found or architecture not in (None, found[0].architecture):
        raise ValueError(
            f"config.json: architectures={architecture!r} with"
            f" model_type={values.get('model_type')!r} is not known; expected one of {known}"
        )
    family, keys = found[0], ConfigKeys(values)
    fields = common_fields(keys) | family.read(keys)
    keys.finish()
    return LlamaConfig(**fields, family=family.name)


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """The contents of a config.json that describes a model, without what its tokenizer says.

    `read_config` reads the same model from it.

    Raises:
      ValueError: for a model that has what its family has not.
    """
    family = FAMILIES[config.family]
    values = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **common_keys(config),
        **family.write(config),
    }
    again = read_config(values)
    for name in ("projection_bias", "query_key_norm", "sliding_window"):
        if getattr(again, name) != getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r}: models of the family {family.name!r} have"
                f" {getattr(again, name)!r}; choose another model.family"
            )
    return values
