"""The optimizer of a run, and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from train.config.optimizers import OPTIMIZERS, OptimizerConfig
from train.optimizer.muon import muon
from train.parallel.model import is_vector


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of steps done: warm-up, then cosine decay.

    `steps` is the length of the run, which is that of the schedule unless the configuration has
    one.
    """
    decay_steps = config.with_schedule_of(steps).decay_steps
    assert decay_steps is not None
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, specs: Mapping[str, P]
) -> optax.GradientTransformation:
    """The optimizer with `make_schedule`, and weight decay on matrices. It does not clip.

    Args:
      config: the optimizer.
      steps: the length of the run.
      specs: how each parameter is sharded, by its name.
    """
    optimizer, schedule = OPTIMIZERS[config.kind], make_schedule(config, steps)
    made = optimizer.make(config, schedule, _decayed)
    return muon(config, schedule, specs, made) if optimizer.orthogonalizes else made


def _decayed(params: dict[str, jax.Array]) -> Any:
    """Whether weight decay applies, for each parameter."""
    # Those of stacked layers, of heads and of experts have several dimensions.
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_vector(path[-1].key), params)
