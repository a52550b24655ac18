"""Reports of a running training: the table on the console, a progress bar, and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from train.log.metrics import Evaluation, Record


class Writer(Protocol):
    """A place that keeps what a run reports: the log file, or an experiment tracker."""

    @property
    def name(self) -> str:
        """The flag that asks for it, with its value."""
        ...

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Keeps an event; `train.log.log_file` lists the kinds."""
        ...

    def close(self, failed: bool) -> None:
        """Flushes and closes. `failed` says whether the run ended with an error."""
        ...


class Reporter:
    """Prints records, hands them to writers, and shows a progress bar on a terminal.

    A context manager, which closes the writers.
    """

    _COLUMNS: tuple[tuple[str, int, Callable[[Record], str]], ...] = (
        ("step", 7, lambda r: f"{r.step}"),
        ("loss", 8, lambda r: f"{r.loss:.4f}"),
        ("grad norm", 9, lambda r: f"{r.grad_norm:.3f}"),
        ("learning rate", 13, lambda r: f"{r.learning_rate:.3e}"),
        ("tokens/s/device", 15, lambda r: f"{r.tokens_per_second_per_device:,.0f}"),
        ("TFLOP/s/device", 14, lambda r: f"{r.tflops_per_device:.4g}"),
        ("MFU", 6, lambda r: "n/a" if r.mfu is None else f"{r.mfu:.1%}"),
        ("memory", 9, lambda r: "n/a" if r.memory_bytes is None else _gib(r.memory_bytes)),
        ("step time", 9, lambda r: f"{r.step_seconds:.3f} s"),
        ("data wait", 9, lambda r: f"{r.data_seconds:.3f} s"),
    )
    #: Columns of models with experts.
    _ROUTERS: tuple[tuple[str, int, Callable[[Record], str]], ...] = (
        ("balance", 8, lambda r: f"{r.balance_loss:.4f}"),
        ("z loss", 8, lambda r: f"{r.router_z_loss:.4f}"),
        ("largest/mean", 12, lambda r: f"{r.largest_over_mean:.2f}"),
    )

    def __init__(self, console: Console, writers: Sequence[Writer], *, first_step: int, steps: int):
        self.records: list[Record] = []
        self._console = console
        self._writers = writers
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.file.isatty(),
        )
        self._task = self._progress.add_task("training", total=steps, completed=first_step)

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        for writer in self._writers:
            writer.close(failed=error is not None)

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        self._progress.update(self._task, completed=step)

    def report(self, record: Record) -> None:
        """Prints and writes one record."""
        columns = self._COLUMNS
        if record.balance_loss is not None:
            columns += self._ROUTERS
        if not self.records:
            self._print(name.rjust(width) for name, width, _ in columns)
        self.records.append(record)
        self._print(text(record).rjust(width) for _, width, text in columns)
        self.write("step", record.values())

    def evaluated(self, step: int, evaluation: Evaluation | None) -> None:
        """Prints and writes the loss on held-out text after a step. None is said to be left out."""
        if evaluation is None:
            self._print([f"{step}".rjust(self._COLUMNS[0][1]), "held-out text is left out"])
            return
        self._print(
            [
                f"{step}".rjust(self._COLUMNS[0][1]),
                f"held-out loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.4g},"
                f" {evaluation.tokens:,} tokens in {evaluation.seconds:.1f} s",
            ]
        )
        self.write("evaluation", {"step": step, **dataclasses.asdict(evaluation)})

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Hands an event to the writers. A full disk does not stop the training."""
        for writer in self._writers:
            try:
                writer.write(event, values)
            except OSError as error:
                self._console.print(
                    f"warning: {writer.name}: {event} {values.get('step', '')} is not in it"
                    f" ({error.strerror or error}); the training goes on",
                    style="yellow",
                    highlight=False,
                    soft_wrap=True,
                    markup=False,
                )

    def _print(self, cells: Iterable[str]) -> None:
        self._console.print("  ".join(cells), highlight=False, soft_wrap=True, markup=False)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
