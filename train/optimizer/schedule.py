"""The learning rate of a run: linear warm-up, then cosine decay."""

from __future__ import annotations

import optax

from train.config.config import OptimizerConfig
from train.config.counts import counted


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


def describe_schedule(config: OptimizerConfig, steps: int) -> str:
    """The learning rate of a run in one sentence."""
    config = config.with_schedule_of(steps)
    final = config.learning_rate * config.final_learning_rate_fraction
    line = (
        f"learning rate: up to {config.learning_rate:g} in"
        f" {counted(config.warmup_steps, 'step')}, down to {final:g} at step {config.decay_steps}"
    )
    assert config.decay_steps is not None
    if config.decay_steps >= steps:
        return line
    if final == 0:
        return f"{line}; later steps train nothing: give a longer --optimizer.decay-steps"
    return f"{line}, then constant (--optimizer.decay-steps)"
