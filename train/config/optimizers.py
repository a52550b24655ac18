"""The optimizers, by the name that ``--optimizer.kind`` takes, and their options.

An optimizer is one entry of `OPTIMIZERS`: the trainer, dry runs, plans and defaults ask it, and
name none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import optax


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: how it is made, its state and its usual learning rate.

    Attributes:
      make: its transformation, from the options, the learning rate, and a function from parameters
        to those that weight decay is for. Each number of an update depends on the same number of
        gradient and parameter alone: devices call it with their shards.
      moments: number of arrays in its state that are as large as what it updates, in float32.
      relative_rate: its usual learning rate as a multiple of AdamW's; None: unknown.
      orthogonalizes: whether Muon updates the matrices of the blocks. `make` and `moments` are then
        for all else.
    """

    make: Callable[[OptimizerConfig, optax.Schedule, Any], optax.GradientTransformation]
    moments: int
    relative_rate: float | None
    orthogonalizes: bool = False


def _adamw(
    config: OptimizerConfig, rate: optax.Schedule, decayed: Any, *, nesterov: bool = False
) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=decayed,
        nesterov=nesterov,
    )


def _adamw_beside_muon(
    config: OptimizerConfig, rate: optax.Schedule, decayed: Any
) -> optax.GradientTransformation:
    # As in `optax.contrib.muon`, all momentum is Nesterov's.
    return _adamw(config, rate, decayed, nesterov=True)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_adamw, moments=2, relative_rate=1.0),
    "muon": Optimizer(_adamw_beside_muon, moments=2, relative_rate=1.0, orthogonalizes=True),
}
# The command line lists the names.
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, with linear warm-up, cosine decay and clipping by global norm."""

    kind: OptimizerName = "adamw"
    """Optimizer of the matrices between embedding and head; with muon, AdamW updates all else."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    final_learning_rate_fraction: float = 0.1
    """Learning rate at the end of the cosine decay, as a fraction of the peak."""
    warmup_steps: int = 100
    decay_steps: int | None = None
    """Step at which the decay ends, counted from the first step; from there on the learning rate
    is constant. Default: the number of steps of the run; a resumed run keeps the schedule that its
    checkpoint was trained with."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices but not to norms."""
    b1: float = 0.9
    """Decay rate of AdamW's mean of gradients."""
    b2: float = 0.95
    """Decay rate of AdamW's mean of squared gradients."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient; larger gradients are scaled down."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's mean of gradients."""
    muon_update_rms: float | None = 0.2
    """Root mean square of Muon's updates before the learning rate; 0.2 is about that of AdamW, so
    that one learning rate suits both. None: the root of columns over rows, or 1 if that is more,
    times an orthogonal matrix."""
    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which Muon's matrices travel and are orthogonalized."""

    def with_schedule_of(self, steps: int) -> OptimizerConfig:
        """Fixes the length of the schedule: the one given, or else that of a run of `steps`."""
        if self.decay_steps is not None:
            return self
        return dataclasses.replace(self, decay_steps=max(steps, self.warmup_steps + 1))

    @property
    def relative_rate(self) -> float | None:
        """The usual learning rate as a multiple of AdamW's; None: unknown."""
        optimizer = OPTIMIZERS[self.kind]
        if optimizer.orthogonalizes and self.muon_update_rms is None:
            return None
        return optimizer.relative_rate
