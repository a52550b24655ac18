"""Families of Llama-style models: one file of differences each, and what config.json calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from models.config import LlamaConfig, debug
from models.families.config_keys import WITHOUT_INFLUENCE, ConfigValues, shown
from models.families.family import common_fields, common_keys
from models.families.gpt_oss import GPT_OSS
from models.families.llama3 import LLAMA
from models.families.mistral import MISTRAL
from models.families.mixtral import MIXTRAL
from models.families.parameter_table import Parameter
from models.families.qwen2 import QWEN2
from models.families.qwen3 import QWEN3
from models.families.qwen3_moe import QWEN3_MOE

FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS)
}

#: The shapes of published models, and of one for a laptop, by name.
PRESETS: dict[str, Callable[[], LlamaConfig]] = {"debug": debug}
for _family in FAMILIES.values():
    PRESETS |= _family.presets

#: A parameter by its path, the same in all families that have it but for its tensor.
PARAMETERS: dict[str, Parameter] = {
    parameter.path: parameter for family in FAMILIES.values() for parameter in family.parameters
}


def parameter_of(name: str) -> Parameter | None:
    """The parameter of a dotted name, with or without the number of a layer; None if it is none of
    the families', such as an adapter."""
    return PARAMETERS.get(re.sub(r"^layers\.\d+\.", "layers.", name))


def parameters_of(config: LlamaConfig) -> list[Parameter]:
    """The parameters that a model has, in the order of its family's files.

    A family without experts names those of a model that has them as Qwen3-MoE does, and one with
    experts names the feed-forward of a model without as Llama does.
    """
    table = FAMILIES[config.family].parameters
    if (config.num_experts is not None) != any(each.role == "expert" for each in table):
        table = (LLAMA if config.num_experts is None else QWEN3_MOE).parameters
    return [parameter for parameter in table if parameter.only_if(config)]


#: Fields that a family may have, of which config.json does not say that others have not.
_PECULIARITIES = (
    "projection_bias", "output_bias", "query_key_norm", "attention_sinks", "sliding_window",
    "full_attention_period", "num_experts", "num_experts_per_token", "normalize_expert_weights",
    "expert_bias", "expert_activation", "router_loss_weight",
)  # fmt: skip


def read_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The shape of the model that a Hugging Face config.json describes.

    Args:
      values: its contents.

    Raises:
      ValueError: for an unknown architecture, a value of the wrong type or out of range, or a key
        or value that changes what the model computes and that is not known; the message names it.
    """
    kind, architectures = values.get("model_type"), values.get("architectures")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not _is_of(architectures, family.architecture):
        listed = architectures if isinstance(architectures, list) else [architectures]
        first = listed[0] if listed else None
        types = {family.architecture: family.name for family in FAMILIES.values()}
        if isinstance(first, str) and first in types and kind in (None, *FAMILIES):
            raise ValueError(
                f"config.json: model_type={shown(kind)}: expected {types[first]!r} with"
                f" architectures={first!r}; write it into the file"
            )
        raise ValueError(
            f"config.json: architectures={shown(first)} with model_type={shown(kind)} is not known;"
            f" expected one of {', '.join(types)}"
        )
    known_values = ConfigValues(values, family.keys, ignored=WITHOUT_INFLUENCE)
    fields = common_fields(known_values) | family.read(known_values)
    return LlamaConfig(**fields, family=family.name)


def _is_of(architectures: Any, name: str) -> bool:
    """Whether the first of a file's architectures, if it names any, is this one."""
    return architectures in (None, []) or (
        isinstance(architectures, list) and architectures[0] == name
    )


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """The contents of a config.json that describes a model, without what its tokenizer says.

    `read_config` reads the same model from it.

    Raises:
      ValueError: for a model that has what its family has not, or that Hugging Face's library would
        refuse.
    """
    family = FAMILIES[config.family]
    values = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **common_keys(config),
        **family.write(config),
    }
    try:
        again = read_config(values)
    except ValueError as error:
        raise ValueError(
            f"models of the family {family.name!r} with these sizes are refused by Hugging Face's"
            f" library ({error}); choose other sizes or another model.family"
        ) from error
    for name in _PECULIARITIES:
        if getattr(again, name) != getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r}: models of the family {family.name!r} have"
                f" {getattr(again, name)!r}; choose another model.family"
            )
    return values
