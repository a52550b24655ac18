"""Metrics of a run: model FLOPs, one record per logged step, the table on the console, the log."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

Batch = TypeVar("Batch")

# Dense bfloat16 tensor-core peak in FLOP/s, by the device name in CUDA. NVIDIA's data sheets print
# twice these numbers where they count 2:4 sparsity.
_PEAK_FLOPS = {
    # A100 Tensor Core GPU data sheet.
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # H100 Tensor Core GPU Architecture whitepaper, table 2; NVL: H100 data sheet.
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12,
    # H200 Tensor Core GPU data sheet: the same compute dies as H100.
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
}


class Device(Protocol):
    """The part of ``jax.Device`` that is used here."""

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def model_flops_per_token(
    *, matmul_parameters: int, layers: int, heads: int, head_dim: int, sequence_length: int
) -> int:
    """FLOPs per token of the model's forward and backward, without recomputation.

    ``6 · matmul_parameters + 12 · layers · heads · head_dim · sequence_length / 2``

    A matmul parameter costs one multiply and one add in the forward, and twice that in the
    backward. The two matmuls of attention cost ``4 · heads · head_dim · sequence_length`` per layer
    in the forward, and three times that with the backward; the causal mask halves it. Chowdhery et
    al., PaLM (2022), appendix B, which ignores the mask.

    Args:
        matmul_parameters: parameters that multiply activations: all but norms and the embedding
          table. The output head counts, tied or not.
        layers: number of transformer blocks.
        heads: number of query heads.
        head_dim: size of one head.
        sequence_length: number of tokens that attend to each other.
    """
    return 6 * matmul_parameters + 6 * layers * heads * head_dim * sequence_length


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s, or None if unknown.

    Args:
        device_kind: ``jax.Device.device_kind``.
    """
    return _PEAK_FLOPS.get(device_kind)


def peak_memory_bytes(device: Device) -> int | None:
    """The maximum number of bytes in use on the device so far, or None if unknown."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


@dataclass(frozen=True)
class Record:
    """A logged step; the field names are the keys of the log file.

    Rates and times are means over the steps since the previous record. None means unknown.
    """

    step: int
    """Number of optimizer steps done."""
    loss: float
    """Mean cross-entropy per token, in nats."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens_per_second: float
    """Tokens per second and device."""
    tflops: float
    """Model TFLOP/s per device."""
    mfu: float | None
    """Model FLOP/s over the device's peak, 0 to 1."""
    memory_bytes: int | None
    """Peak bytes in use on the first device."""
    step_seconds: float
    """Wall time per step, including waits and saves."""
    data_seconds: float
    """Part of that spent waiting for the batch."""


class Meter:
    """Turns times and counts into records.

    Args:
      tokens_per_step: tokens of one step, on all devices.
      flops_per_token: model FLOPs, forward and backward.
      devices: devices of one kind.
      clock: returns seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        devices: Sequence[Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens = tokens_per_step / len(devices)
        self._flops_per_token = flops_per_token
        self._device = devices[0]
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Starts an interval."""
        self._started, self._data_seconds, self._steps = self._clock(), 0.0, 0

    def read(self, batches: Iterator[Batch]) -> Batch:
        """The next batch. The time it takes counts as waiting for data."""
        started = self._clock()
        batch = next(batches)
        self._data_seconds += self._clock() - started
        return batch

    def step_done(self) -> None:
        """Counts a step whose result has arrived."""
        self._steps += 1

    def record(self, step: int, loss: float, grad_norm: float, learning_rate: float) -> Record:
        """The record of the interval that ends with `step`. Starts the next interval."""
        seconds = (self._clock() - self._started) / self._steps
        data_seconds = self._data_seconds / self._steps
        self.start()
        tokens_per_second = self._tokens / seconds
        flops = tokens_per_second * self._flops_per_token
        peak = peak_flops(self._device.device_kind)
        return Record(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=tokens_per_second,
            tflops=flops / 1e12,
            mfu=None if peak is None else flops / peak,
            memory_bytes=peak_memory_bytes(self._device),
            step_seconds=seconds,
            data_seconds=data_seconds,
        )


def check_log_file(log_file: str | None, resume: bool) -> None:
    """Refuses a log file that cannot be written, or that holds anything a run must not change.

    A resumed run appends to its log and repeats the steps after its checkpoint. The last line of a
    step is the valid one.

    Raises:
        ValueError: the file cannot be written, or holds an earlier run's log and `resume` is False,
          or holds something other than a log.
    """
    if log_file is None:
        return
    path = Path(log_file)
    try:
        path.open("a").close()
        is_empty, is_log = path.stat().st_size == 0, _is_log(path)
    except OSError as error:
        raise ValueError(
            f"log_file={log_file!r}: {error.strerror}; give a file to write, in a folder there is"
        ) from None
    if not is_log:
        raise ValueError(
            f"log_file={log_file!r}: holds something other than a run's log; give another name"
        )
    if not resume and not is_empty:
        raise ValueError(
            f"log_file={log_file!r}: holds an earlier run's log; give another name, or --resume to"
            " append to it"
        )


class Reporter:
    """Prints records, appends them to the log file, and shows a progress bar on a terminal."""

    _COLUMNS: tuple[tuple[str, int, Callable[[Record], str]], ...] = (
        ("step", 7, lambda r: f"{r.step}"),
        ("loss", 8, lambda r: f"{r.loss:.4f}"),
        ("grad norm", 9, lambda r: f"{r.grad_norm:.3f}"),
        ("learning rate", 13, lambda r: f"{r.learning_rate:.3e}"),
        ("tokens/s/device", 15, lambda r: f"{r.tokens_per_second:,.0f}"),
        ("TFLOP/s/device", 14, lambda r: f"{r.tflops:.4g}"),
        ("MFU", 6, lambda r: "n/a" if r.mfu is None else f"{r.mfu:.1%}"),
        ("memory", 9, lambda r: "n/a" if r.memory_bytes is None else _gib(r.memory_bytes)),
        ("step time", 9, lambda r: f"{r.step_seconds:.3f} s"),
        ("data wait", 9, lambda r: f"{r.data_seconds:.3f} s"),
    )

    def __init__(self, console: Console, log_file: str | None, *, first_step: int, steps: int):
        self.records: list[Record] = []
        self._console = console
        self._file = None if log_file is None else _open_log(Path(log_file))
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
        self._print(name.rjust(width) for name, width, _ in self._COLUMNS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        self._progress.update(self._task, completed=step)

    def report(self, record: Record) -> None:
        """Prints and logs one record."""
        self.records.append(record)
        self._print(text(record).rjust(width) for _, width, text in self._COLUMNS)
        if self._file is not None:
            values = {
                name: value if value is None or math.isfinite(value) else None
                for name, value in dataclasses.asdict(record).items()
            }
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()

    def _print(self, cells: Iterable[str]) -> None:
        self._console.print("  ".join(cells), highlight=False, soft_wrap=True, markup=False)


def _is_log(path: Path) -> bool:
    """Whether the file is empty or starts like a record, which may be incomplete."""
    beginning = b'{"step": '
    with path.open("rb") as file:
        return beginning.startswith(file.read(len(beginning)))


def _open_log(path: Path) -> TextIO:
    """Opens a log for appending. Removes an incomplete last line, which a killed run may leave."""
    if path.exists():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
