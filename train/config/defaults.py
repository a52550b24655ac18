"""Defaults that follow from what else a run is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from flax import traverse_util

from models.parameters.adapters import LoraConfig, Training
from train.config.config import Config
from train.config.model_folder import (
    DEFAULT_PRESET,
    first_configuration,
    is_model_file,
    model_folder,
    with_model_of,
)
from train.config.presets import PRESETS

#: Fields whose defaults follow from the model of a Hugging Face folder or file, by dotted name.
OF_MODEL = ("optimizer.learning_rate", "optimizer.warmup_steps", "sequence_length")
#: Fields whose defaults follow from other settings, by dotted name: those that `implied` may
#: return. Of each, a resumed run keeps what its checkpoint was trained with.
FOLLOWING = (
    "steps",
    "batch_size",
    "freeze",
    *OF_MODEL,
    *(f"lora.{field.name}" for field in dataclasses.fields(LoraConfig)),
    "zero",
)
#: Rates of pre-training: those of Llama 3's three models lie on this curve (Llama Team, "The Llama
#: 3 Herd of Models", 2024, table 3). To tune all weights takes about a thirtieth, and adapters take
#: ten times as much as that (Schulman et al., "LoRA Without Regret", 2025).
_RATE_OF_8B, _FINE_TUNING_FRACTION, _ADAPTERS = 3e-4, 1 / 30, 10
_MOST_WARMUP, _MOST_TOKENS, _TOKENS = 100, 4096, 2048
#: A learning rate that is this many times the usual one is questioned.
_SUSPICIOUS = 10


def implied(config: Config) -> dict[str, Any]:
    """The defaults that are not those of the preset: dotted name of a field -> value.

    An fsdp axis of several devices shards what it can: ZeRO level 3, or 1 beside frozen weights,
    which matmuls cannot gather on every mesh. An optimizer has a learning rate of its own. Weights
    of a Hugging Face folder or a checkpoint are fine-tuned, and the model of a config.json without
    a preset is trained, by defaults that follow from the model. A resumed run keeps its learning
    rate and warm-up, the length and the number of sequences of a step, the number of steps, the
    ZeRO level, adapters and what is frozen, as its checkpoint was trained with them.

    Args:
      config: what the run is asked for, with the values of its preset for all else.
    """
    values = of_optimizer(config)
    if config.mesh.fsdp > 1:
        values["zero"] = 1 if Training(config.lora, config.freeze).freezes else 3
    saved = traverse_util.flatten_dict(saved_configuration(config), sep=".")
    values |= {name: saved[name] for name in FOLLOWING if name in saved}
    if config.resume or _has_own_defaults(config) is None:
        return values
    with suppress(ValueError, ImportError):  # The preparation of the run says what is wrong.
        values |= of_model(with_model_of(config))
    return values


def _has_own_defaults(config: Config) -> str | None:
    """The kind of run, in words, whose defaults follow from a model that is not a preset's; None:
    they are those of the preset."""
    if _has_weights(config):
        return "fine-tuning"
    is_free = config.preset == DEFAULT_PRESET and "preset" not in config.given
    return "this model" if is_free and is_model_file(config) else None


def _has_weights(config: Config) -> bool:
    """Whether a new run does not begin with random weights, or a resumed one did not with those of
    a Hugging Face folder."""
    return config.init_from is not None or model_folder(config) is not None


def of_model(config: Config) -> dict[str, Any]:
    """The defaults of a run with the model of a Hugging Face folder or file, or with the weights of
    a checkpoint, by dotted name.

    The sequence length is that of the checkpoint, else a power of two within the model's context,
    and at most 4096.
    """
    steps = config.optimizer.decay_steps or config.steps
    tokens = min(config.model.context_length or _TOKENS, _MOST_TOKENS)
    values = (
        float(f"{usual_learning_rate(config):.0e}"),
        max(min(steps // 20, _MOST_WARMUP), 0),
        first_configuration(config).get("sequence_length", 2 ** (tokens.bit_length() - 1)),
    )
    return dict(zip(OF_MODEL, values, strict=True))


def of_optimizer(config: Config) -> dict[str, Any]:
    """The preset's learning rate, which is AdamW's, as one of the run's optimizer, by dotted name;
    none if it is the same or unknown."""
    if config.optimizer.relative_rate in (None, 1.0):
        return {}
    rate = PRESETS[config.preset]().optimizer.learning_rate * config.optimizer.relative_rate
    return {"optimizer.learning_rate": float(f"{rate:.1e}")}


def usual_learning_rate(config: Config) -> float:
    """A usual learning rate of the optimizer for a model of this size: of adapters, of fine-tuning,
    or from random weights. An optimizer of which none is known has AdamW's."""
    rate = _RATE_OF_8B * (8e9 / config.model.matmul_parameters) ** (1 / 3)
    rate *= config.optimizer.relative_rate or 1.0
    if config.lora.rank is not None:
        return rate * _FINE_TUNING_FRACTION * _ADAPTERS
    return rate * _FINE_TUNING_FRACTION if _has_weights(config) else rate


def describe_defaults(config: Config) -> list[str]:
    """The defaults of a preset, of a model or of the optimizer that a new run has taken, as lines
    to print, and a warning of a learning rate that is far from usual."""
    lines = [*describe_preset(config), *describe_taken(config)]
    folder = model_folder(config)
    if folder is not None and config.tokenizer is None:
        lines.append(
            f"warning: {folder} has no tokenizer.json, so text is read as bytes, which its model"
            " may not know; give --tokenizer FILE"
        )
    usual, is_known = usual_learning_rate(config), config.optimizer.relative_rate is not None
    if config.optimizer.learning_rate >= _SUSPICIOUS * usual and is_known:
        lines.append(
            f"warning: optimizer.learning_rate={config.optimizer.learning_rate:g} is"
            f" {config.optimizer.learning_rate / usual:.0f} times what is usual for"
            f" {config.model.matmul_parameters:,} weights, about {usual:.1g}; a run at such a rate"
            " may diverge, or forget what the weights have learnt"
        )
    return lines


def describe_taken(config: Config, names: Collection[str] = FOLLOWING) -> list[str]:
    """The defaults of a model or of the optimizer that a new run has taken, as lines to print.

    Args:
      config: the configuration, with the model that it says.
      names: the fields that are of interest.
    """
    what = _has_own_defaults(config)
    taken = of_optimizer(config) if what is None else of_model(config)
    now = traverse_util.flatten_dict(config.to_json(), sep=".")
    return [
        f"default for {what or config.optimizer.kind}: --{name.replace('_', '-')} {value}"
        for name, value in taken.items()
        if name in names and name not in config.given and now[name] == value and not config.resume
    ]


def describe_preset(config: Config) -> list[str]:
    """A line that says where the model comes from, if a preset and a folder each describe one, and
    what the preset gives beside."""
    folder = model_folder(config)
    if folder is None or config.preset == DEFAULT_PRESET:
        return []
    usual, given, now = (
        traverse_util.flatten_dict(each.to_json(), sep=".")
        for each in (PRESETS[DEFAULT_PRESET](), PRESETS[config.preset](), config)
    )
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in given.items()
        if value != usual[name] and value == now[name]
        if name not in config.given and name != "preset" and not name.startswith("model.")
    ]
    return [
        f"the model is that of {folder}; --preset {config.preset} gives"
        f" {', '.join(flags) or 'nothing'} and no model"
    ]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values of some fields, by dotted name."""
    for name, value in values.items():
        group, dot, field = name.partition(".")
        if dot:
            value = dataclasses.replace(getattr(config, group), **{field: value})
        config = dataclasses.replace(config, **{group: value})
    return config


def saved_configuration(config: Config) -> Mapping[str, Any]:
    """The configuration of the checkpoint that the run resumes from; empty if there is none."""
    return first_configuration(config) if config.resume else {}
