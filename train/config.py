"""What a run is: dataclasses that the command line fills in, and the presets.

A name here is a flag there: ``Config.mesh.tensor`` is ``--mesh.tensor``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models import config as models
from models.config import LlamaConfig
from models.llama import Remat


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out, data × tensor. 0 takes what fits."""

    data: int = 0
    """Groups of devices, each with a whole copy of the model; 0: all devices that are left."""
    tensor: int = 0
    """Devices that share one copy, and each sequence; 0: as many as divide the model."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, a cosine decay and clipping by global norm."""

    learning_rate: float = 3e-4
    """At its peak."""
    final_learning_rate_fraction: float = 0.1
    """Of the peak, where the cosine ends."""
    warmup_steps: int = 100
    weight_decay: float = 0.1
    """Decoupled from the gradient; on matrices, not on norms."""
    b1: float = 0.9
    """Decay of the mean of gradients."""
    b2: float = 0.95
    """Decay of the mean of their squares."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""


@dataclass(frozen=True)
class Config:
    """Train a Llama on text with collective matmuls."""

    model: LlamaConfig
    preset: str = "debug"
    """Where the other defaults come from: debug, llama3-8b, llama3-70b or llama3-405b."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1000
    """Optimizer steps of the whole run, those before a resume included."""
    batch_size: int = 8
    """Sequences per optimizer step, over all devices."""
    sequence_length: int = 8192
    """Tokens per sequence."""
    accumulate: int = 1
    """Microbatches that an optimizer step is computed in, one after the other."""
    overlap: Literal["auto", "ring", "xla", "rewrite"] = "auto"
    """How a matmul meets its collective: auto decides for each shape; rewrite does too, in a model
    of JAX's own collectives, whose whole step it gives to collective_matmul.overlap."""
    remat: Remat = "none"
    """What the backward computes again: nothing, all but matmul results (dots), or all (full)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations, and of weights where they are used; master weights are float32."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""
    data: str | None = None
    """File or glob of text, or of JSON lines with a "text" field; default: the Python manual."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; default: bytes."""
    checkpoint_dir: str | None = None
    """Where checkpoints go; default: none are saved."""
    save_interval: int = 100
    """Steps between checkpoints. The last step is always saved."""
    keep: int = 3
    """Checkpoints kept, the newest."""
    resume: bool = False
    """Go on from the newest checkpoint in --checkpoint-dir."""
    log_interval: int = 10
    """Steps between log lines."""
    log_file: str | None = None
    """Log lines go here too, as JSON lines."""
    profile: str | None = None
    """FIRST:LAST, the steps that jax.profiler records."""
    profile_dir: str = "profile"
    """Where the profile goes."""
    cpu_devices: int = 8
    """Simulated devices, on a machine without GPUs."""
    print_config: bool = False
    """Print the configuration as JSON, and stop."""
    dry_run: bool = False
    """Print bytes per device and the matmuls that communicate, and stop; any mesh will do."""

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to profile.

        Raises:
          ValueError: if `profile` is not two step numbers in order.
        """
        if self.profile is None:
            return None
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
            raise ValueError(
                f"profile={self.profile!r}: expected FIRST:LAST, two steps from 1 on, as in 10:13"
            )
        return int(first), int(last)

    def to_json(self) -> dict[str, Any]:
        """Nested dictionaries of plain values."""
        return dataclasses.asdict(self)


def check(config: Config, data: int, tensor: int) -> None:
    """Raises ValueError for what does not fit together on a data × tensor mesh."""
    for name in (
        "steps", "batch_size", "sequence_length", "accumulate", "save_interval", "keep",
        "log_interval",
    ):  # fmt: skip
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: expected at least 1")
    _check_optimizer(config.optimizer)
    config.model.check_tensor_axis(tensor)
    if config.sequence_length % tensor:
        raise ValueError(
            f"sequence_length={config.sequence_length} is not divisible by mesh.tensor={tensor};"
            f" nearest that works: {-(-config.sequence_length // tensor) * tensor}"
        )
    if config.batch_size % (data * config.accumulate):
        unit = data * config.accumulate
        raise ValueError(
            f"batch_size={config.batch_size} is not divisible by mesh.data={data} ×"
            f" accumulate={config.accumulate}; nearest that works:"
            f" {-(-config.batch_size // unit) * unit}"
        )
    if config.resume and config.checkpoint_dir is None:
        raise ValueError("resume: expected checkpoint_dir too; add --checkpoint-dir DIR")
    if config.profile_steps is not None and config.profile_steps[1] > config.steps:
        raise ValueError(
            f"profile={config.profile!r}: the run has {config.steps} steps; name steps among them"
        )
    if Path(config.profile_dir).is_file():
        raise ValueError(f"profile_dir={config.profile_dir!r}: is a file; name a folder")


def _check_optimizer(config: OptimizerConfig) -> None:
    """Raises ValueError for a value that AdamW, its schedule or clipping has no meaning for."""
    for name, fits, expected in (
        ("learning_rate", 0 < config.learning_rate < math.inf, "a positive number"),
        ("final_learning_rate_fraction", 0 <= config.final_learning_rate_fraction <= 1, "0 to 1"),
        ("warmup_steps", config.warmup_steps >= 0, "at least 0"),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "at least 0"),
        ("b1", 0 <= config.b1 < 1, "at least 0 and less than 1"),
        ("b2", 0 <= config.b2 < 1, "at least 0 and less than 1"),
        ("clip_norm", config.clip_norm > 0, "a positive number; inf never clips"),
    ):
        if not fits:
            raise ValueError(f"optimizer.{name}={getattr(config, name)}: expected {expected}")


def debug() -> Config:
    """A minute on a laptop, on simulated devices."""
    return Config(
        preset="debug",
        model=models.debug(),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=10),
        steps=160,
        log_interval=20,
        batch_size=16,
        sequence_length=128,
    )


def llama3_8b() -> Config:
    """Llama 3.1 8B."""
    return Config(preset="llama3-8b", model=models.llama3_8b())


def llama3_70b() -> Config:
    """Llama 3.1 70B, keeping only matmul results for the backward."""
    return Config(
        preset="llama3-70b",
        model=models.llama3_70b(),
        optimizer=OptimizerConfig(learning_rate=1.5e-4),
        remat="dots",
    )


def llama3_405b() -> Config:
    """Llama 3.1 405B, keeping nothing but block inputs for the backward."""
    return Config(
        preset="llama3-405b",
        model=models.llama3_405b(),
        optimizer=OptimizerConfig(learning_rate=8e-5),
        remat="full",
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "debug": debug,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
    "llama3-405b": llama3_405b,
}
