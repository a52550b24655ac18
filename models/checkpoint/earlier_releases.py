"""Checkpoints of earlier releases: other names of settings, and fewer of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields of `train.config.config.Config` by the names that they had.
FIELDS = {"keep": "max_to_keep", "accumulate": "gradient_accumulation_steps"}
#: Values by field and by the names that they had.
VALUES = {"overlap": {"bulk": "xla"}}
#: Fields that earlier releases did not have, with the values that mean what these releases did.
NEW_FIELDS: dict[str, Any] = {
    "text_column": "text",
    "separate_documents": False,
    "zero": 0,
    "gradient_dtype": "float32",
    "weight_gather": "auto",
    "scan_layers": 0,
    "fp8": None,
    "fp8_layers": "layers.*",
    "chat": False,
    "chat_template_kwargs": "{}",
    "eval_only": False,
    "attention": "auto",
    "expert_axes": "tensor",
    "expert_hidden_axis": None,
    "recompute_expert_hidden": False,
    "balance_loss_weight": None,
    "router_z_loss_weight": 0.0,
    # A loss in chunks is the same up to rounding.
    "loss_chunk": None,
    "context_attention": "auto",
    "freeze": "",
    "lora": {
        "rank": None,
        "alpha": 16.0,
        "dropout": 0.0,
        "targets": "all-linear",
        "rslora": False,
        "train": "",
        "base_format": None,
    },
}
#: The same of `models.config.LlamaConfig`.
NEW_MODEL_FIELDS: dict[str, Any] = {
    "family": "llama",
    "projection_bias": False,
    "output_bias": False,
    "attention_sinks": False,
    "query_key_norm": False,
    "sliding_window": None,
    "full_attention_period": None,
    "context_length": None,
    "padded_vocabulary_size": None,
    "num_experts": None,
    "num_experts_per_token": None,
    "normalize_expert_weights": True,
    "expert_bias": False,
    "expert_activation": "silu",
    "router_loss_weight": 0.0,
}
#: The same of `models.config.RotaryScaling`.
NEW_ROTARY_FIELDS: dict[str, Any] = {
    "kind": "llama3",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": None,
    "truncate": True,
}
#: The same of `train.config.config.OptimizerConfig`.
NEW_OPTIMIZER_FIELDS: dict[str, Any] = {
    "kind": "adamw",
    "muon_momentum": 0.95,
    "muon_update_rms": 0.2,
    "muon_dtype": "bfloat16",
}


def current_configuration(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with today's names of fields and values."""
    current = {FIELDS.get(name, name): value for name, value in saved.items()}
    for field, values in VALUES.items():
        if isinstance(current.get(field), str):
            current[field] = values.get(current[field], current[field])
    return current


def trained_configuration(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that was saved with a checkpoint, with today's names and fields."""
    current = {**NEW_FIELDS, **current_configuration(saved)}
    if isinstance(current.get("model"), Mapping):
        current["model"] = model = {**NEW_MODEL_FIELDS, **current["model"]}
        if isinstance(model.get("rotary_scaling"), Mapping):
            model["rotary_scaling"] = {**NEW_ROTARY_FIELDS, **model["rotary_scaling"]}
    if isinstance(current.get("mesh"), Mapping):
        current["mesh"] = {"fsdp": 0, "context": 1, **current["mesh"]}
    if not isinstance(current.get("optimizer"), Mapping):
        return current
    optimizer = {**NEW_OPTIMIZER_FIELDS, **current["optimizer"]}
    current["optimizer"] = optimizer
    if "decay_steps" in optimizer or "steps" not in current:
        return current
    decay_steps = max(current["steps"], optimizer.get("warmup_steps", 0) + 1)
    return {**current, "optimizer": {**optimizer, "decay_steps": decay_steps}}
