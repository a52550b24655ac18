"""Records of a run, and a reporter of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from train.log.metrics import Record
from train.log.reporter import Reporter, Writer

RECORD = Record(
    step=10,
    loss=2.5,
    grad_norm=0.75,
    learning_rate=3e-4,
    tokens_per_second_per_device=12345.6,
    tflops_per_device=412.5,
    mfu=0.417,
    memory_bytes=3 * 2**30,
    step_seconds=0.25,
    data_seconds=0.001,
)


def run(records: list[Record], *writers: Writer, output: Any = None) -> str:
    """Reports the records and returns what was printed."""
    output = io.StringIO() if output is None else output
    with reporter(*writers, output=output) as reports:
        for record in records:
            reports.advance(record.step)
            reports.report(record)
    return output.getvalue()


def reporter(*writers: Writer, output: io.StringIO | None = None) -> Reporter:
    console = Console(file=io.StringIO() if output is None else output)
    sequence: Sequence[Writer] = writers
    return Reporter(console, sequence, first_step=0, steps=100)
