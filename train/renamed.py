"""Names of earlier releases: flags that users type, and what checkpoints and logs hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: Fields of `train.config.Config` by the names that they had.
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
}
#: The same of `models.config.LlamaConfig`.
NEW_MODEL_FIELDS: dict[str, Any] = {
    "family": "llama",
    "projection_bias": False,
    "query_key_norm": False,
    "sliding_window": None,
    "context_length": None,
    "padded_vocabulary_size": None,
}
#: The same of `train.config.OptimizerConfig`.
NEW_OPTIMIZER_FIELDS: dict[str, Any] = {
    "kind": "adamw",
    "muon_momentum": 0.95,
    "muon_update_rms": 0.2,
    "muon_dtype": "bfloat16",
}
#: Fields of `train.metrics.Record` by the names that they had. Both were per device.
RECORD_FIELDS = {"tokens_per_second": "tokens_per_second_per_device", "tflops": "tflops_per_device"}


def current_arguments(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with today's names of flags and values.

    Prints a sentence on stderr for each that was renamed.
    """
    current: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            old, equals, value = argument.partition("=")
            flag = _current_flag(old)
            argument = flag + equals + (_current_value(flag, value) if equals else "")
        elif flag:
            argument, flag = _current_value(flag, argument), ""
        current.append(argument)
    return current


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
        current["model"] = {**NEW_MODEL_FIELDS, **current["model"]}
    if isinstance(current.get("mesh"), Mapping):
        current["mesh"] = {"fsdp": 0, **current["mesh"]}
    if not isinstance(current.get("optimizer"), Mapping):
        return current
    optimizer = {**NEW_OPTIMIZER_FIELDS, **current["optimizer"]}
    current["optimizer"] = optimizer
    if "decay_steps" in optimizer or "steps" not in current:
        return current
    decay_steps = max(current["steps"], optimizer.get("warmup_steps", 0) + 1)
    return {**current, "optimizer": {**optimizer, "decay_steps": decay_steps}}


def current_record(logged: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a log with today's names. In earlier releases each line was a step."""
    current = {RECORD_FIELDS.get(name, name): value for name, value in logged.items()}
    return {"event": "step", **current}


def _current_flag(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    if name not in FIELDS:
        return flag
    current = "--" + FIELDS[name].replace("_", "-")
    _warn(flag, current)
    return current


def _current_value(flag: str, value: str) -> str:
    values = VALUES.get(flag.removeprefix("--"), {})
    if value not in values:
        return value
    _warn(f"{flag} {value}", f"{flag} {values[value]}")
    return values[value]


def _warn(old: str, current: str) -> None:
    sentence = f"warning: {old} is now called {current}; the old name will be removed"
    print(sentence, file=sys.stderr)
