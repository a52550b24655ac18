"""`--tune`: measures the collective matmuls of a run's step, so that runs choose the fastest."""

from __future__ import annotations

import jax
from rich.console import Console

from collective_matmul import tune
from train.config.config import Config
from train.config.model_folder import model_name
from train.memory.step_memory import abstract_batch
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.model import ModelFunctions
from train.run.setup import complete
from train.step import sharded_step


def tune_step(config: Config, console: Console) -> None:
    """Measures each collective matmul of a training step on the devices here, and saves the table.

    Traces the step without weights or data. `collective_matmul.tune` prints how long it takes, its
    progress and the path of the table.

    Raises:
      ValueError: if values do not fit together or do not fit the devices, or if the devices are no
        GPUs and the configuration names no file for their table.
    """
    if jax.default_backend() != "gpu" and config.tune_table is None:
        raise ValueError(
            f"tune: JAX finds no GPU, only {jax.default_backend()} devices, where nothing runs"
            " under a matmul; add --tune-table FILE to measure them all the same, which may take"
            " long"
        )
    config, sizes, mesh = complete(config)
    model = ModelFunctions(config, sizes, jax.local_device_count())
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    console.print(
        f"{model_name(config)} on {sizes}: the collective matmuls of one step, each measured with"
        " every backend",
        highlight=False,
        soft_wrap=True,
    )
    step = sharded_step(config, model, optimizer, mesh)
    state = state_on_mesh(model, optimizer, mesh)
    tune(step, state, abstract_batch(config), path=config.tune_table)
