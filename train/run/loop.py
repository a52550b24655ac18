"""The training loop: reads a batch, starts its step, logs the previous step, saves checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NoReturn

import jax
from jax.sharding import NamedSharding
from rich.console import Console

from train.checkpoint.base_weights import base_identity
from train.log.log_file import LogFile
from train.log.metrics import Meter, Record
from train.log.reporter import Reporter, Writer
from train.log.run_record import run_record
from train.log.trackers import TensorBoard, WeightsAndBiases
from train.optimizer.state import TrainState, trained_part, weights_of
from train.parallel.batches import batch_specs, global_arrays, local_rows
from train.parallel.model import Params
from train.processes.agreement import StopRequest
from train.processes.connection import is_first
from train.processes.shutdown import Shutdown
from train.run.evaluation import Evaluator
from train.run.initial_state import initial_state
from train.run.programs import compile_together
from train.run.setup import Setup
from train.step import Metrics, make_parameter_norm, make_step


class NonFiniteError(ArithmeticError):
    """A loss, gradient or parameter is infinite or NaN, on all processes."""

    agreed = True


def train(
    setup: Setup,
    console: Console,
    listener: Callable[[Record], object] | None = None,
    shutdown: Shutdown | None = None,
) -> list[Record]:
    """Trains to the last step, and waits for the last checkpoint.

    Args:
      setup: what to train, and where.
      console: receives the log.
      listener: called with each record.
      shutdown: receives signals that ask to stop early.

    Returns:
      The logged records.

    Raises:
      NonFiniteError: at a step whose loss or gradient is not finite, or whose new parameters, about
        to be saved, are not. Earlier checkpoints are kept.
      SaveError: a checkpoint cannot be saved.
      Interrupted: a signal asked to stop. The state after the last step that was done is saved.
    """
    config, checkpoints = setup.config, setup.checkpoints
    rows = local_rows(setup.mesh, config.batch_size)
    batches = setup.text.iterator(rows)
    profiler = _Profiler(config.profile_steps if is_first() else None, config.profile_dir)
    shutdown = shutdown or Shutdown()
    stop_request = StopRequest(shutdown, setup.mesh)
    try:
        state, first_step = initial_state(setup, batches, console)
        saved = setup.configuration | base_identity(state)
        with _open_reporter(setup, console, first_step) as reporter:
            step = _compile(setup, state, console)
            parameter_norm = make_parameter_norm(setup.model, setup.mesh)
            ending = _StepEnd(setup, reporter, listener)
            shutdown.defer()
            for number in range(first_step + 1, config.steps + 1):
                profiler.before(number)
                own_rows = ending.meter.read(batches)
                batch = global_arrays(own_rows, setup.mesh, config.batch_size)
                # The step runs while the host waits for the previous one and logs it.
                state, metrics = step(state, batch)
                ending.wait()
                ending.pending = number, metrics
                profiler.after(number, metrics)
                ending.evaluate(number, weights_of(state), stop_request)
                stopping = stop_request()
                if checkpoints is not None and (
                    number == config.steps or stopping or checkpoints.should_save(number)
                ):
                    ending.wait()  # A state that is not finite must not be saved.
                    ending.check_parameters(number, float(parameter_norm(state["params"])))
                    checkpoints.save(number, trained_part(state), batches.get_state(), saved)
                if stopping and number < config.steps:
                    ending.wait()
                    shutdown.stop(number, config.checkpoint_dir, stop_request.signal)
            ending.wait()
        return reporter.records
    finally:
        profiler.close()
        if checkpoints is not None:
            checkpoints.close()


class _StepEnd:
    """Waits for a step's metrics, counts the step, logs it at the end of an interval, evaluates."""

    def __init__(
        self, setup: Setup, reporter: Reporter, listener: Callable[[Record], object] | None
    ):
        self.setup, self.reporter, self.listener = setup, reporter, listener
        self.evaluator = None
        if setup.held_out is not None:
            self.evaluator = Evaluator(setup.config, setup.model, setup.mesh, setup.held_out)
        self.pending: tuple[int, Metrics] | None = None
        config = setup.config
        self.meter = Meter(
            tokens_per_step=config.batch_size * config.sequence_length,
            flops_per_token=setup.model.flops_per_token(setup.text.attention_length),
            devices=setup.mesh.size,
            device=setup.mesh.local_devices[0],
        )

    def wait(self) -> None:
        """Finishes the pending step, if there is one."""
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
            record = self.meter.record(number, **{name: float(x) for name, x in metrics.items()})
            self.reporter.report(record)
            if self.listener is not None:
                self.listener(record)
        if not finite:
            self._stop(number, f"loss {loss} and gradient norm {grad_norm} are not both finite")

    def evaluate(self, number: int, params: Params, should_stop: Callable[[], bool]) -> None:
        """Evaluates on held-out text, if it is due and nothing asks to stop. The time does not
        count for the steps."""
        config = self.setup.config
        if self.evaluator is None or (number % config.eval_interval and number != config.steps):
            return
        self.wait()
        with self.meter.paused():
            evaluation = self.evaluator(params, should_stop)
        self.reporter.evaluated(number, evaluation)

    def check_parameters(self, number: int, norm: float) -> None:
        """Raises NonFiniteError if the norm of the parameters is not finite."""
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
    """Records the requested steps."""

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


def _open_reporter(setup: Setup, console: Console, first_step: int) -> Reporter:
    """A reporter to the console and to what the configuration names. Records the run first."""
    config = setup.config
    writers: list[Writer] = []
    if config.log_file is not None and is_first():
        writers.append(LogFile(config.log_file))
    if config.tensorboard is not None and is_first():
        writers.append(TensorBoard(config.tensorboard, first_step))
    if setup.wandb_run_id is not None and is_first():
        writers.append(WeightsAndBiases(setup.wandb_run_id))
    description = run_record(setup.configuration, setup.mesh) if writers else {}
    reporter = Reporter(console, writers, first_step=first_step, steps=config.steps)
    if config.resume:
        reporter.write("resume", {"step": first_step, **description})
    else:
        reporter.write("start", description)
    return reporter


def _compile(setup: Setup, state: TrainState, console: Console):
    """The compiled step. Prints how long it took and what executes the collective matmuls."""
    config = setup.config
    shapes = setup.text.batch_shapes
    specs = batch_specs(shapes, setup.mesh)
    batch = {
        name: jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(setup.mesh, specs[name]))
        for name, shape in shapes.items()
    }
    started = time.perf_counter()
    step = make_step(config, setup.model, setup.optimizer, setup.mesh)
    program = compile_together(step, state, batch)
    seconds = f"compiled in {time.perf_counter() - started:.1f} s; "
    for line in (seconds + program.lines[0], *program.lines[1:]):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return program.run
