"""Experiment trackers: TensorBoard and Weights & Biases, through their own libraries.

Scalars are named by their event, such as ``step/loss`` and ``evaluation/loss``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config.config import Config


class TensorBoard:
    """Writes events for TensorBoard.

    Args:
      directory: the folder of the run.
      first_step: number of steps done. Events of later steps, which a resumed run repeats, are
        dropped by TensorBoard.
    """

    def __init__(self, directory: str, first_step: int):
        import tensorboardX

        self.name = f"tensorboard={directory!r}"
        self._writer = tensorboardX.SummaryWriter(
            directory,
            purge_step=first_step + 1 if first_step else None,
            flush_secs=10,
            # Names have the second of the start: runs of one second would share a file.
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Writes numbers as scalars, and the description of a run as text."""
        step = values.get("step", 0)
        if event in ("start", "resume"):
            text = json.dumps(values, indent=2)
            self._writer.add_text(event, f"```json\n{text}\n```", step)
            return
        for name, value in _scalars(event, values).items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """Writes what is still in memory."""
        del failed
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, which takes its settings from its variables, such as WANDB_PROJECT.

    Args:
      run_id: the run, which a resumed run continues.

    Raises:
      ValueError: the run cannot be opened, for example without a login.
    """

    name = "wandb"

    def __init__(self, run_id: str):
        import wandb

        try:
            self._run = wandb.init(id=run_id, resume="allow")
        except wandb.Error as error:
            raise ValueError(
                f"wandb: {str(error).rstrip('.')}; run `wandb login`, set WANDB_MODE=offline, or"
                " leave --wandb out"
            ) from error
        # A resumed run logs some steps again, which its own counter of calls would refuse.
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Logs numbers, and updates the configuration by the description of a run."""
        if event in ("start", "resume"):
            self._run.config.update(dict(values), allow_val_change=True)
        else:
            self._run.log({**_scalars(event, values), "train_step": values["step"]})

    def close(self, failed: bool) -> None:
        """Finishes the run."""
        self._run.finish(exit_code=int(failed))


def check_trackers(config: Config) -> None:
    """Checks that the trackers of a configuration can be used.

    Raises:
      ImportError: a package is missing.
      ValueError: the folder of TensorBoard cannot be written, or holds an earlier run's events and
        the run does not resume.
    """
    for flag, wanted, package, extra in (
        ("--tensorboard", config.tensorboard is not None, "tensorboardX", "tensorboard"),
        ("--wandb", config.wandb, "wandb", "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ImportError(
                f"{flag}: needs the package {package}; pip install '.[{extra}]' in the repository,"
                f" or leave {flag} out"
            )
    if config.tensorboard is not None:
        _check_event_folder(config.tensorboard, config.resume)


def new_run_id() -> str:
    """The identity of a new run at Weights & Biases: its variable WANDB_RUN_ID, or a random one."""
    return os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]


def _check_event_folder(directory: str, resume: bool) -> None:
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ValueError(
            f"tensorboard={directory!r}: cannot be written ({reason}); give a folder that can"
        )
    if not resume and any(path.glob("events.out.tfevents.*")):
        raise ValueError(
            f"tensorboard={directory!r}: holds an earlier run's events; give another folder, or"
            " --resume to continue that run"
        )


def _scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers by name. There is no scalar for what is unknown."""
    return {
        f"{event}/{name}": value
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
