"""Defaults that follow from what else a run is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from models.adapters import Training
from models.checkpoint.saved_checkpoint import find_checkpoint
from train.config import Config


def implied(config: Config) -> dict[str, Any]:
    """The defaults that are not those of the preset: dotted name of a field -> value.

    An fsdp axis of several devices shards what it can: ZeRO level 3, or 1 beside frozen weights,
    which matmuls cannot gather on every mesh. A resumed run keeps the level of its checkpoint.

    Args:
      config: what the run is asked for, with the values of its preset for all else.
    """
    values: dict[str, Any] = {}
    saved = _saved(config)
    if config.mesh.fsdp > 1:
        level = 1 if Training(config.lora, config.freeze).freezes else 3
        values["zero"] = saved.get("zero", level)
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values of some fields, by dotted name."""
    for name, value in values.items():
        group, dot, field = name.partition(".")
        if dot:
            value = dataclasses.replace(getattr(config, group), **{field: value})
        config = dataclasses.replace(config, **{group: value})
    return config


def _saved(config: Config) -> dict[str, Any]:
    """The configuration of the checkpoint that the run resumes from; empty if there is none."""
    if not config.resume or config.checkpoint_dir is None:
        return {}
    step = "" if config.resume_step is None else f"/step_{config.resume_step}"
    with suppress(ValueError):  # The opening of the checkpoint says what is wrong with it.
        return find_checkpoint(config.checkpoint_dir + step).configuration()
    return {}
