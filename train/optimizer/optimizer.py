"""The optimizer of a run: AdamW, or Muon beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from train.config.config import OptimizerConfig
from train.optimizer.muon import muon
from train.optimizer.schedule import make_schedule
from train.parallel.model import is_vector


def make_optimizer(
    config: OptimizerConfig, steps: int, specs: Mapping[str, P]
) -> optax.GradientTransformation:
    """AdamW or Muon with `make_schedule`, and weight decay on matrices. It does not clip.

    Args:
      config: the optimizer.
      steps: the length of the run.
      specs: how each parameter is sharded, by its name.
    """
    schedule = make_schedule(config, steps)
    if config.kind == "adamw":
        return _adamw(config, schedule)
    # As in `optax.contrib.muon`, all momentum is Nesterov's.
    return muon(config, schedule, specs, _adamw(config, schedule, nesterov=True))


def _adamw(
    config: OptimizerConfig, schedule: optax.Schedule, *, nesterov: bool = False
) -> optax.GradientTransformation:
    def decayed(params: dict[str, jax.Array]) -> Any:
        # Those of stacked layers, of heads and of experts have several dimensions.
        return jax.tree_util.tree_map_with_path(lambda path, _: not is_vector(path[-1].key), params)

    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=decayed,
        nesterov=nesterov,
    )
