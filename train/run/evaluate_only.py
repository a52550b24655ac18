"""The evaluation of saved weights, without a training: ``--eval-only``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding
from rich.console import Console

from models.parameters.adapters import LoraConfig, Training
from train.checkpoint.base_weights import check_base, frozen_weights
from train.checkpoint.initial_weights import InitialWeights, check_weights, find_weights
from train.config.checks import warnings_of
from train.config.config import Config
from train.config.model_folder import naming
from train.log.log_file import LogFile, check_log_file
from train.log.metrics import Evaluation
from train.log.reporter import Reporter
from train.optimizer.state import FROZEN
from train.parallel.model import ModelFunctions
from train.processes.agreement import together
from train.processes.connection import is_first
from train.run.evaluation import Evaluator
from train.run.setup import complete, open_held_out, training_of


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
        saved = weights.configuration()
        config, sizes, mesh = complete(config)
        if is_first():
            check_log_file(config.log_file, resume=False)
        held_out = open_held_out(config)
        assert held_out is not None
        model = ModelFunctions(config, sizes, jax.local_device_count())
        check_weights(weights, model.abstract_params, config)
        base = _open_base(config, model)
    abstract = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, model.specs[name])
        )
        for name, leaf in model.abstract_params.items()
    }
    params = weights.restore_params(abstract)
    if model.frozen_params:
        frozen = frozen_weights(base, model, mesh)
        check_base(saved, {FROZEN: frozen}, config.init_from)
        params |= frozen
    for line in warnings_of(config):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
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
    if config.checkpoint_dir is not None:
        run = None
        # Else the error is that both are given.
        with nullcontext() if config.init_from is None else suppress(ValueError):
            run = _find(config, "checkpoint_dir")
        saved = {} if run is None else run.configuration()
        if run is not None and training_of(saved).freezes:
            return _with_training_of(config, saved), run
    if Training(config.lora, config.freeze).freezes:
        raise ValueError(
            "eval_only: with --lora.rank or --freeze, expected checkpoint_dir, a run that trained"
            " so; give its folder as --checkpoint-dir"
        )
    if (config.init_from is None) == (config.checkpoint_dir is None):
        given = "both" if config.init_from is not None else "neither"
        raise ValueError(
            f"eval_only: expected init_from or checkpoint_dir, and {given} of them is given; name"
            " the weights to evaluate by one of them"
        )
    name = "init_from" if config.init_from is not None else "checkpoint_dir"
    weights = _find(config, name)
    return _without_run(config, getattr(config, name)), weights


def _find(config: Config, name: Literal["init_from", "checkpoint_dir"]) -> InitialWeights:
    path = getattr(config, name)
    with naming(name, path):
        return find_weights(path)


def _without_run(config: Config, init_from: str | None) -> Config:
    return dataclasses.replace(
        config,
        init_from=init_from,
        checkpoint_dir=None,
        resume=False,
        resume_step=None,
        profile=None,
    )


def _with_training_of(config: Config, saved: Mapping[str, Any]) -> Config:
    """The configuration with the adapters and the frozen parameters of a run, beside the weights
    that the run began with unless the configuration names others.

    Raises:
      ValueError: flags ask for others.
    """
    was_trained = training_of(saved)
    lora, freeze = was_trained.lora, was_trained.freeze
    for name, asked, was, default in (
        ("lora", config.lora, lora, LoraConfig()),
        ("freeze", config.freeze, freeze, ""),
    ):
        if asked not in (default, was):
            raise ValueError(
                f"{name}={asked!r}: the checkpoint was trained with {was!r}; leave out these flags,"
                " since the checkpoint says what they were"
            )
    config = dataclasses.replace(config, lora=lora, freeze=freeze)
    return _without_run(config, config.init_from or saved.get("init_from"))


def _open_base(config: Config, model: ModelFunctions) -> InitialWeights | None:
    """The weights beside which others were trained; None for random ones, or if all were."""
    if not model.frozen_params or config.init_from is None:
        return None
    base = _find(config, "init_from")
    check_weights(base, model.base_params, config)
    return base
