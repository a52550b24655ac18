"""Presets: the settings of a run for each published model, and a run for laptops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from models import families
from train.config.config import Config, OptimizerConfig


def debug() -> Config:
    """A run of about a minute on a laptop, on simulated devices."""
    return _preset(
        "debug",
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=10),
        steps=160,
        log_interval=20,
        batch_size=16,
        sequence_length=128,
    )


def llama3_70b() -> Config:
    """Llama 3.1 70B; saves only matmul results for the backward."""
    optimizer = OptimizerConfig(learning_rate=1.5e-4)
    return _preset("llama3-70b", optimizer=optimizer, remat="dots")


def llama3_405b() -> Config:
    """Llama 3.1 405B; saves only block inputs for the backward."""
    optimizer = OptimizerConfig(learning_rate=8e-5)
    return _preset("llama3-405b", optimizer=optimizer, remat="full")


def _preset(name: str, **settings: Any) -> Config:
    """The settings of a run, with the published model of this name."""
    return Config(preset=name, model=families.PRESETS[name](), **settings)


PRESETS: dict[str, Callable[[], Config]] = {
    **{name: functools.partial(_preset, name) for name in families.PRESETS},
    "debug": debug,
    "llama3-70b": llama3_70b,
    "llama3-405b": llama3_405b,
}
