"""Random weights that runs of one model begin with, drawn once for all meshes.

XLA compiles the random numbers for each mesh anew, as long as it compiles a step of a small model.
`test_initial_weights_are_the_same_on_every_mesh` in test_step.py draws them on each.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import optax
from jax.sharding import Mesh

from models.config import LlamaConfig
from train.checkpoint.new_state import init_state
from train.config.config import ONE_DEVICE, Config
from train.config.presets import debug
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import TrainState
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions, Params


def first_state(
    config: Config, model: ModelFunctions, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state of `init_state`, with weights that were drawn on one device."""
    weights = _drawn(config.model, config.seed, config.scan_layers)
    return init_state(model, optimizer, mesh, weights)


@functools.cache
def _drawn(model: LlamaConfig, seed: int, scan_layers: int) -> Params:
    config = dataclasses.replace(
        debug(), model=model, seed=seed, scan_layers=scan_layers, overlap="xla"
    )
    functions = ModelFunctions(config)
    optimizer = make_optimizer(config.optimizer, config.steps, functions.specs)
    return jax.device_get(init_state(functions, optimizer, make_mesh(ONE_DEVICE))["params"])
