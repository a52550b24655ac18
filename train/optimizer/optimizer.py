"""The optimizer of a run: AdamW, or Muon beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from train.config.optimizers import OPTIMIZERS, OptimizerConfig
from train.optimizer.muon import muon
from train.optimizer.schedule import make_schedule
from train.parallel.model import is_vector


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
