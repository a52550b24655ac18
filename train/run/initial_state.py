"""Where a run begins: a checkpoint of its own, the weights of another run, or random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grain
import numpy as np
from rich.console import Console

from models.checkpoint.saved_checkpoint import CONTEXT_LENGTH, differences
from models.paths import expanded
from train.checkpoint.base_weights import check_base, frozen_weights, load_base
from train.checkpoint.new_state import init_state
from train.config.counts import counted
from train.optimizer.state import (
    FROZEN,
    TrainState,
    state_on_mesh,
    trained_part,
    with_weights,
)
from train.run.setup import Setup

# Fields that do not influence any number of a run, or not after its beginning.
_WITHOUT_INFLUENCE = (
    "base", "checkpoint_dir", "config", "cpu_devices", "device", "devices", "distributed",
    "eval_batches", "eval_data", "eval_interval", "eval_only", "eval_text", "init_from",
    "log_file", "log_interval", "max_to_keep", "mesh_sizes", "plan", "plan_network",
    "profile", "profile_dir", "resume", "resume_step", "save_interval", "tensorboard", "tune",
    "tune_table", "verbose", "wandb", "wandb_run_id",
)  # fmt: skip


def initial_state(
    setup: Setup, batches: grain.DatasetIterator[dict[str, np.ndarray]], console: Console
) -> tuple[TrainState, int]:
    """The initial state and the number of steps before it. Positions `batches` accordingly."""
    if setup.checkpoints is None or not setup.config.resume:
        return _new_state(setup, console), 0

    def print_line(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    abstract = state_on_mesh(setup.model, setup.optimizer, setup.mesh)
    restored = setup.checkpoints.restore(trained_part(abstract))
    state = with_weights(restored.state, abstract)
    before = setup.checkpoints.configuration(restored.step)
    if FROZEN in abstract:
        state = {**state, FROZEN: frozen_weights(setup.init_from, setup.model, setup.mesh)}
        check_base(before, state, setup.config.init_from)
    batches.set_state(restored.data_position)
    print_line(f"resumed from the checkpoint of step {restored.step}")
    if not restored.verified:
        print_line("it is not verified: an earlier release saved it, without checksums")
    if setup.config.init_from is not None and FROZEN not in abstract:
        where = "that is where the run began"
        if setup.began_with != setup.config.init_from:
            began = setup.began_with or "random weights"
            where = f"the run began with {began}, and goes on from its checkpoint"
        print_line(f"--init-from {setup.config.init_from} is not read: {where}")
    changed = changed_settings(before, setup.configuration)
    if changed:
        print_line(f"changed since: {changed}")
    for line in _about_batches(before, setup.configuration):
        print_line(line)
    return state, restored.step


def _about_batches(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A warning of steps with another number of sequences than before, as lines to print."""
    was, now = saved.get("batch_size"), current["batch_size"]
    if was in (None, now):
        return []
    return [
        f"warning: batch_size={now}: a step has {counted(now, 'sequence')} from here on, and had"
        f" {was} before. No sequence is left out or read twice, but --steps, the learning rate and"
        f" its schedule were chosen for {was}; give --batch-size {was} to go on as before"
    ]


def _new_state(setup: Setup, console: Console) -> TrainState:
    """The state before the first step, with random weights or those of another run."""
    saved = setup.init_from
    if saved is None:
        return init_state(setup.model, setup.optimizer, setup.mesh)
    params = load_base(saved, setup.model, setup.mesh)
    line = f"weights from {saved.path}; the optimizer, the schedule and the data begin anew"
    names = ("model", "tokenizer")
    was = {name: value for name, value in saved.configuration().items() if name in names}
    changed = changed_settings(was, {name: setup.configuration[name] for name in names})
    if changed:
        line += f"; not as there: {changed}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)
    return init_state(setup.model, setup.optimizer, setup.mesh, params)


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The settings with influence on the numbers of a run that differ, as text; "" for none."""
    return ", ".join(
        f"{name} was {was}, is {now}"
        for name, (was, now) in differences(saved, current).items()
        if name.partition(".")[0] not in _WITHOUT_INFLUENCE
        and name != CONTEXT_LENGTH
        and not (name.startswith("mesh.") and now == 0)  # Chosen, and said beside the parameters.
        and not (name == "tokenizer" and _are_equal_files(was, now))
    )


def _are_equal_files(*paths: str | None) -> bool:
    """Whether all are paths of files that are here, with the same contents."""
    files = [expanded(path) for path in paths if path is not None]
    if len(files) < len(paths) or not all(file.is_file() for file in files):
        return False
    return len({file.read_bytes() for file in files}) == 1
