"""The loop: reads a batch, dispatches its step, logs the step before, saves now and then."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import jax
from rich.console import Console

from collective_matmul import record_decisions
from train.checkpoint import differences
from train.metrics import Meter, Record, Reporter, model_flops_per_token
from train.setup import Setup
from train.state import TrainState, init_state, state_on_mesh
from train.step import Metrics, make_parameter_norm, make_step

# What may change from run to run without changing a number.
_WITHOUT_INFLUENCE = (
    "checkpoint_dir", "keep", "log_file", "log_interval", "profile", "profile_dir", "resume",
    "save_interval",
)  # fmt: skip


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or parameters that are infinite or not numbers."""


def train(
    setup: Setup, console: Console, listener: Callable[[Record], object] | None = None
) -> list[Record]:
    """Trains to the last step, and waits for the last checkpoint.

    Args:
      setup: what to train, on what.
      console: where the log goes.
      listener: is given each record too, as it comes.

    Returns:
      What was logged.

    Raises:
      NonFiniteError: at the step whose loss or gradient is not finite, or whose new parameters,
        about to be saved, are not; the checkpoints before it are kept.
    """
    config, checkpoints = setup.config, setup.checkpoints
    batches = setup.text.iterator()
    profiler = _Profiler(config.profile_steps, config.profile_dir)
    try:
        state, first_step = _initial_state(setup, batches, console)
        step = _compile(setup, state, console)
        parameter_norm = make_parameter_norm(setup.model, setup.mesh)
        with Reporter(
            console, config.log_file, first_step=first_step, steps=config.steps
        ) as reporter:
            ending = _StepEnd(setup, reporter, listener)
            for number in range(first_step + 1, config.steps + 1):
                profiler.before(number)
                batch = jax.device_put(ending.meter.read(batches), setup.batch_sharding)
                # From here on this step runs, while the host waits for the one before and logs it.
                state, metrics = step(state, batch)
                ending.wait()
                ending.pending = number, metrics
                profiler.after(number, metrics)
                if checkpoints is not None and (
                    number == config.steps or checkpoints.should_save(number)
                ):
                    ending.wait()  # What is not finite must not be saved.
                    ending.check_parameters(number, float(parameter_norm(state["params"])))
                    checkpoints.save(number, state, batches.get_state(), setup.configuration)
            ending.wait()
        return reporter.records
    finally:
        profiler.close()
        if checkpoints is not None:
            checkpoints.close()


class _StepEnd:
    """Waits for a step's metrics, counts the step, logs it if an interval ends with it."""

    def __init__(
        self, setup: Setup, reporter: Reporter, listener: Callable[[Record], object] | None
    ):
        self.setup, self.reporter, self.listener = setup, reporter, listener
        self.pending: tuple[int, Metrics] | None = None
        config, model = setup.config, setup.config.model
        self.meter = Meter(
            tokens_per_step=config.batch_size * config.sequence_length,
            flops_per_token=model_flops_per_token(
                matmul_parameters=model.matmul_parameters,
                layers=model.num_layers,
                heads=model.num_heads,
                head_dim=model.head_dim,
                sequence_length=config.sequence_length,
            ),
            devices=list(setup.mesh.devices.flat),
        )

    def wait(self) -> None:
        """Ends the pending step, if there is one."""
        if self.pending is None:
            return
        (number, metrics), self.pending = self.pending, None
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self.meter.step_done()
        self.reporter.advance(number)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        interval_ends = number % self.setup.config.log_interval == 0
        first_or_last = not self.reporter.records or number == self.setup.config.steps
        if interval_ends or first_or_last or not finite:
            record = self.meter.record(number, loss, grad_norm)
            self.reporter.report(record)
            if self.listener is not None:
                self.listener(record)
        if not finite:
            self._stop(number, f"loss {loss} and gradient norm {grad_norm} are not both finite")

    def check_parameters(self, number: int, norm: float) -> None:
        """Raises NonFiniteError for parameters that the next step could compute no loss from."""
        if not math.isfinite(norm):
            self._stop(number, f"the norm of the updated parameters, {norm}, is not finite")

    def _stop(self, number: int, reason: str) -> NoReturn:
        raise NonFiniteError(
            f"step {number}: {reason}; stopped, {self._kept()}; try a lower"
            " --optimizer.learning-rate or a longer --optimizer.warmup-steps"
        )

    def _kept(self) -> str:
        checkpoints = self.setup.checkpoints
        step = None if checkpoints is None else checkpoints.latest_step()
        return (
            "no checkpoint was saved" if step is None else f"the checkpoint of step {step} is kept"
        )


class _Profiler:
    """Records the steps asked for, each to its end."""

    def __init__(self, steps: tuple[int, int] | None, directory: str):
        self._steps, self._directory, self._running = steps, directory, False

    def before(self, number: int) -> None:
        if self._steps is not None and number == self._steps[0]:
            jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, number: int, metrics: Metrics) -> None:
        if self._running and self._steps is not None and number == self._steps[1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def _initial_state(setup: Setup, batches, console: Console) -> tuple[TrainState, int]:
    """The state to start from and the steps it has behind it; puts `batches` in their place."""
    if setup.checkpoints is None or not setup.config.resume:
        return init_state(setup.model, setup.optimizer, setup.mesh), 0
    restored = setup.checkpoints.restore(state_on_mesh(setup.model, setup.optimizer, setup.mesh))
    batches.set_state(restored.data_position)
    console.print(f"resumed from the checkpoint of step {restored.step}", highlight=False)
    changed = differences(setup.checkpoints.configuration(restored.step), setup.configuration)
    listed = [
        f"{name} was {was}, is {now}"
        for name, (was, now) in changed.items()
        if name not in _WITHOUT_INFLUENCE
    ]
    if listed:
        # The learning rate too: its decay is stretched over all steps.
        console.print(f"changed since: {', '.join(listed)}", highlight=False, soft_wrap=True)
    return restored.state, restored.step


def _compile(setup: Setup, state: TrainState, console: Console):
    """The compiled step. Says how long it took, and what carries out the collective matmuls."""
    config = setup.config
    tokens = jax.ShapeDtypeStruct(
        (config.batch_size, config.sequence_length), "int32", sharding=setup.batch_sharding
    )
    started = time.perf_counter()
    with record_decisions() as decisions:
        step = make_step(config, setup.model, setup.optimizer, setup.mesh)
        compiled = step.lower(state, {"inputs": tokens, "targets": tokens}).compile()
    kinds = Counter(f"{d.implementation} ({d.reason})" for d in dict.fromkeys(decisions))
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    console.print(
        f"compiled in {time.perf_counter() - started:.1f} s; collective matmuls of different"
        f" shape: {listed}",
        highlight=False,
        soft_wrap=True,
    )
    return compiled
