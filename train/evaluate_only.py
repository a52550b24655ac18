"""The evaluation of saved weights, without a training: ``--eval-only``."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import NamedSharding
from rich.console import Console

from train.agreement import together
from train.config import Config
from train.evaluation import Evaluation, Evaluator
from train.initial_weights import InitialWeights, find_weights
from train.log_file import LogFile, check_log_file
from train.processes import is_first
from train.reporter import Reporter
from train.setup import complete, open_held_out
from train.state import ModelFunctions


def evaluate_only(config: Config, console: Console) -> Evaluation:
    """Prints and logs the loss of weights on held-out text. Saves nothing else.

    Args:
      config: names the weights by `init_from` or `checkpoint_dir`, and the text by `eval_data`.
      console: receives the result.

    Raises:
      ValueError: for settings that do not fit together, and files that cannot be read.
    """
    with together():
        config, weights = _with_weights(config)
        config, sizes, mesh = complete(config)
        if is_first():
            check_log_file(config.log_file, resume=False)
        held_out = open_held_out(config)
        assert held_out is not None
        model = ModelFunctions(config, sizes, jax.local_device_count())
        weights.check_params(model.abstract_params)
    abstract = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, model.specs[name])
        )
        for name, leaf in model.abstract_params.items()
    }
    params = weights.restore_params(abstract)
    console.print(
        f"weights from {weights.path}, on {sizes}; held-out text: {held_out.description}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    evaluation = Evaluator(config, model, mesh, held_out)(params)
    assert evaluation is not None
    writers = [LogFile(config.log_file)] if config.log_file is not None and is_first() else []
    step = getattr(weights, "step", 0)
    with Reporter(console, writers, first_step=step, steps=step) as reporter:
        reporter.evaluated(step, evaluation)
    return evaluation


def _with_weights(config: Config) -> tuple[Config, InitialWeights]:
    """The weights to evaluate, and the configuration with their place as `init_from`."""
    if config.eval_data is None:
        raise ValueError("eval_only: expected eval_data too; add --eval-data FILE")
    if (config.init_from is None) == (config.checkpoint_dir is None):
        given = "both" if config.init_from is not None else "neither"
        raise ValueError(
            f"eval_only: expected init_from or checkpoint_dir, and {given} of them is given; name"
            " the weights to evaluate by one of them"
        )
    name = "init_from" if config.init_from is not None else "checkpoint_dir"
    path = config.init_from or config.checkpoint_dir
    assert path is not None
    try:
        weights = find_weights(path)
    except ValueError as error:
        raise ValueError(f"{name}={path!r}: {error}") from error
    config = dataclasses.replace(
        config, init_from=path, checkpoint_dir=None, resume=False, resume_step=None, profile=None
    )
    return config, weights
