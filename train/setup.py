"""Preparation of a run: everything that can be refused before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from train.checkpoint import Checkpoints
from train.config import Config, check
from train.data import TextData, open_dataset
from train.log_file import check_log_file
from train.mesh import make_mesh, mesh_sizes
from train.saved_checkpoint import differences
from train.state import ModelFunctions, make_optimizer
from train.step import BATCH_SPEC


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start.

    Attributes:
      config: its configuration.
      mesh: mesh with the axes "data" and "tensor".
      text: the data.
      model: the model.
      optimizer: the optimizer.
      checkpoints: open checkpoints, to be closed by the owner; None if nothing is saved.
    """

    config: Config
    mesh: Mesh
    text: TextData
    model: ModelFunctions
    optimizer: optax.GradientTransformation
    checkpoints: Checkpoints | None

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of the arrays of a batch."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration that is saved with the state."""
        return _configuration(self.config, self.text)


def prepare(config: Config) -> Setup:
    """Opens everything that a run needs.

    Raises:
      ValueError: for settings that do not fit together, and files that cannot be read or would be
        overwritten.
    """
    data, tensor = mesh_sizes(config.mesh, config.model, jax.device_count())
    check(config, data, tensor)
    check_log_file(config.log_file, config.resume)
    text = open_dataset(
        config.data,
        config.tokenizer,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        text_column=config.text_column,
        separate_documents=config.separate_documents,
    )
    if text.vocabulary_size > config.model.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={config.model.vocabulary_size}: expected at least the"
            f" {text.vocabulary_size} tokens of the tokenizer"
        )
    checkpoints = _open_checkpoints(config, text)
    config = _with_schedule(config, checkpoints)
    return Setup(
        config=config,
        mesh=make_mesh(data, tensor),
        text=text,
        model=ModelFunctions(config),
        optimizer=make_optimizer(config.optimizer, config.steps),
        checkpoints=checkpoints,
    )


def _with_schedule(config: Config, checkpoints: Checkpoints | None) -> Config:
    """The configuration with a length of the schedule. A resumed run keeps that of its checkpoint
    unless it names one, so that more steps do not raise the learning rate again."""
    optimizer = config.optimizer
    if checkpoints is not None and config.resume and optimizer.decay_steps is None:
        saved = checkpoints.configuration().get("optimizer", {}).get("decay_steps")
        optimizer = dataclasses.replace(optimizer, decay_steps=saved)
    return dataclasses.replace(config, optimizer=optimizer.with_schedule_of(config.steps))


def _configuration(config: Config, text: TextData) -> dict[str, Any]:
    return {**config.to_json(), "text": {"sha256": text.sha256, "token_count": text.token_count}}


def _open_checkpoints(config: Config, text: TextData) -> Checkpoints | None:
    if config.checkpoint_dir is None:
        return None
    checkpoints = Checkpoints(
        config.checkpoint_dir,
        resume=config.resume,
        resume_step=config.resume_step,
        max_to_keep=config.max_to_keep,
        save_interval=config.save_interval,
    )
    if config.resume:
        try:
            _check_resumable(checkpoints, _configuration(config, text), config.steps)
        except ValueError:
            checkpoints.close()
            raise
    return checkpoints


def _check_resumable(checkpoints: Checkpoints, now: Mapping[str, Any], steps: int) -> None:
    """Checks that the newest checkpoint has the same model and data, and fewer than `steps` steps.

    Raises:
      ValueError: if it has not.
    """
    checkpoints.check_same_model(now)
    saved = checkpoints.configuration()
    # The position in the data is a number of sequences, which is meaningless for other data.
    names = ("text", "sequence_length", "seed")
    changed = differences({n: saved.get(n) for n in names}, {n: now[n] for n in names})
    if changed:
        listed = ", ".join(f"{name} was {was}, is {new}" for name, (was, new) in changed.items())
        raise ValueError(
            f"resume: the checkpoint was saved with other data: {listed}; give the data, tokenizer,"
            " sequence length and seed it was saved with"
        )
    latest = checkpoints.latest_step()
    if latest is not None and latest >= steps:
        raise ValueError(
            f"steps={steps}: the checkpoint already has {latest} steps; give --steps a larger"
            " number to continue"
        )
