"""What a run reports: model FLOPs, one record per step, the table on the console, the log file."""

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

# Dense bf16 tensor-core peak in FLOP/s, by the name that CUDA gives the device. NVIDIA's data
# sheets print twice these numbers where they count 2:4 sparsity.
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
    """What is asked of a ``jax.Device``."""

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def model_flops_per_token(
    *, matmul_parameters: int, layers: int, heads: int, head_dim: int, sequence_length: int
) -> int:
    """FLOPs that the model's forward and backward need per token, recomputation not counted.

    ``6 · matmul_parameters + 12 · layers · heads · head_dim · sequence_length / 2``

    A parameter of a matmul costs one multiply and one add in the forward and twice that in the
    backward. Attention's two products over the sequence cost ``4 · heads · head_dim ·
    sequence_length`` per layer forward, three times that with the backward; the causal mask
    halves it. Chowdhery et al., PaLM (2022), appendix B, which leaves the mask out.

    Args:
        matmul_parameters: parameters that multiply activations: all but norms and the embedding
            table; the output head counts, tied or not.
        layers: transformer blocks.
        heads: query heads.
        head_dim: size of one head.
        sequence_length: tokens that attend to each other.
    """
    return 6 * matmul_parameters + 6 * layers * heads * head_dim * sequence_length


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device in FLOP/s, or None where it is not known.

    Args:
        device_kind: ``jax.Device.device_kind``.
    """
    return _PEAK_FLOPS.get(device_kind)


def peak_memory_bytes(device: Device) -> int | None:
    """The most bytes that were in use on the device so far, or None where it does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


@dataclass(frozen=True)
class Record:
    """One step as it is reported; the field names are the keys of the log file.

    Rates and times are means over the steps since the last logged one. None reads "not known".
    """

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean cross-entropy per token, in nats."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    tokens_per_second: float
    """Per device."""
    tflops: float
    """Model TFLOP/s per device."""
    mfu: float | None
    """Model FLOP/s over the device's peak, 0 to 1."""
    memory_bytes: int | None
    """Peak bytes in use on the first device."""
    step_seconds: float
    """Wall time per step, waits and saves included."""
    data_seconds: float
    """Of that, how long the step waited for its batch."""


class Meter:
    """Turns times and counts into records.

    Args:
      tokens_per_step: over all devices.
      flops_per_token: model FLOPs, forward and backward.
      devices: all of one kind.
      clock: gives seconds.
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
        """Begins an interval now."""
        self._started, self._data_seconds, self._steps = self._clock(), 0.0, 0

    def read(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time it takes counts as waiting for data."""
        started = self._clock()
        batch = next(batches)
        self._data_seconds += self._clock() - started
        return batch

    def step_done(self) -> None:
        """Counts a step whose result has arrived."""
        self._steps += 1

    def record(self, step: int, loss: float, grad_norm: float) -> Record:
        """The record of the interval that ends with `step`; begins the next."""
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
            tokens_per_second=tokens_per_second,
            tflops=flops / 1e12,
            mfu=None if peak is None else flops / peak,
            memory_bytes=peak_memory_bytes(self._device),
            step_seconds=seconds,
            data_seconds=data_seconds,
        )


def check_log_file(log_file: str | None, resume: bool) -> None:
    """Refuses a log that cannot be written, or that holds what a run must not write to.

    A run that goes on appends, and repeats the steps after its checkpoint: the last line of a step
    is the one that counts.

    Raises:
        ValueError: it is no writable file, or it holds an earlier run's log and `resume` is False,
            or something other than a log.
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
    """Prints records as they come, appends them to the log file, and moves a bar on a terminal."""

    _COLUMNS: tuple[tuple[str, int, Callable[[Record], str]], ...] = (
        ("step", 7, lambda r: f"{r.step}"),
        ("loss", 8, lambda r: f"{r.loss:.4f}"),
        ("grad norm", 9, lambda r: f"{r.grad_norm:.3f}"),
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
        """Moves the bar."""
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
    """Whether the file is empty or begins as a record does, be it cut short."""
    beginning = b'{"step": '
    with path.open("rb") as file:
        return beginning.startswith(file.read(len(beginning)))


def _open_log(path: Path) -> TextIO:
    """Opens a log to append to, after removing a last line that a killed run cut short."""
    if path.exists():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
