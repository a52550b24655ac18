"""Says where the time of a profile went: `python -m benchmarks.timeline TRACE_DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.profiling import ANNOTATION, EXECUTIONS
from benchmarks.timeline.analysis import DeviceTimeline, Kind, Row, analyze, rows
from benchmarks.timeline.trace import TraceError, read_trace

WIDTH_OF_A_FILE = 150


def main(
    trace: Annotated[Path, tyro.conf.Positional],
    /,
    executions: int = EXECUTIONS,
    since: str = ANNOTATION,
    top: int = 25,
) -> None:
    """Breaks down what the GPUs did; the defaults are for what `--profile` of a benchmark writes.

    Args:
        trace: The directory that jax.profiler.trace wrote to, or one file of it.
        executions: How many executions to average.
        since: The name of an annotation on the host; all that started after the last one counts.
        top: How many rows of the table by kernel to print.
    """
    try:
        timelines = analyze(read_trace(trace), executions=executions, since=since)
    except TraceError as error:
        sys.exit(str(error))
    table = rows(timelines)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    console.print(device_table(timelines), kernel_table(table, timelines, top))


def device_table(timelines: list[DeviceTimeline]) -> Table:
    table = Table(title="µs per execution", title_justify="left")
    table.add_column("GPU")
    columns = ("time", *map(str, Kind), "idle", "communication", "exposed")
    for name in (*columns, "hidden by matmuls", "by any compute"):
        table.add_column(name, justify="right")
    for timeline in timelines:
        exposed = timeline.communication - timeline.hidden_under_compute
        times = (timeline.duration, *timeline.busy.values(), timeline.idle, timeline.communication)
        shares = (
            f"{hidden / timeline.communication:.1%}" if timeline.communication else "-"
            for hidden in (timeline.hidden_under_matmul, timeline.hidden_under_compute)
        )
        numbers = (f"{time / timeline.executions:.1f}" for time in (*times, exposed))
        table.add_row(timeline.device.removeprefix("/device:"), *numbers, *shares)
    return table


def kernel_table(kernels: list[Row], timelines: list[DeviceTimeline], top: int) -> Table:
    duration = sum(timeline.duration for timeline in timelines)
    duration /= sum(timeline.executions for timeline in timelines)
    table = Table(title="average GPU, one execution; µs", title_justify="left")
    for name in ("kind", "kernel", "HLO instruction"):
        table.add_column(name, overflow="fold")
    for name in ("count", "total", "each", "of time", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in kernels[:top]:
        numbers = (
            f"{row.count:.4g}",
            f"{row.total:.1f}",
            f"{row.total / row.count:.1f}",
            f"{row.total / duration:.1%}",
            "" if row.hidden is None else f"{row.hidden:.0%}",
        )
        table.add_row(row.kind, row.name, row.hlo_op, *numbers)
    if rest := kernels[top:]:
        total = sum(row.total for row in rest)
        numbers = (f"{sum(row.count for row in rest):.4g}", f"{total:.1f}", "")
        table.add_row("", f"{len(rest)} more", "", *numbers, f"{total / duration:.1%}", "")
    return table


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.timeline")
