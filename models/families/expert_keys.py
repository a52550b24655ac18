"""What families with experts share: keys of config.json, and the checks of their values."""

from __future__ import annotations

from typing import Any

from models.config import LlamaConfig
from models.families.config_keys import FLAG, SIZE, ConfigValues, Key, fractions
from models.families.family import Fields

EXPERT_KEYS = (
    Key("num_experts_per_tok", SIZE, 2),
    Key("router_aux_loss_coef", fractions(), 0.001),
    # Whether answers of Hugging Face's library have the router's numbers, and its loss their share.
    Key("output_router_logits", FLAG, False),
)


def expert_fields(values: ConfigValues, experts: int) -> Fields:
    """The fields that every family with experts has.

    Args:
      values: the values of the family's keys.
      experts: the number of experts.

    Raises:
      ValueError: if there are fewer experts than a token is sent to.
    """
    chosen = values["num_experts_per_tok"]
    if chosen > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} is more than the number of experts,"
            f" {experts}; give the file that the model came with"
        )
    return dict(
        num_experts=experts,
        num_experts_per_token=chosen,
        router_loss_weight=values["router_aux_loss_coef"],
    )


def expert_keys(config: LlamaConfig) -> dict[str, Any]:
    """The keys that `expert_fields` reads; those of the number of experts are the family's."""
    return {
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": float(config.router_loss_weight),
    }
