"""A profile of one candidate, and how much of its communication other work hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.timeline.analysis import DeviceTimeline, analyze
from benchmarks.timeline.trace import read_trace

#: Executions of a program in its profile, and the annotation around them.
EXECUTIONS = 2
ANNOTATION = "profiled"


@dataclass(frozen=True)
class Profile:
    """The numbers of a profile, for each device.

    Attributes:
      folder: name of the folder of the trace.
      microseconds: of one execution.
      communication: of that, the microseconds in which something was communicated.
      hidden_share: of those, the share in which other work ran too; None for no communication.
      hidden_under_matmul_share: in which a matmul ran too.
    """

    folder: str
    microseconds: tuple[float, ...]
    communication: tuple[float, ...]
    hidden_share: tuple[float | None, ...]
    hidden_under_matmul_share: tuple[float | None, ...]


def record_timelines(run: Callable[[], Any], folder: Path) -> list[DeviceTimeline]:
    """Profiles a warm program.

    Raises:
      TraceError: if the profile holds no work of GPUs.
    """
    with jax.profiler.trace(str(folder)), jax.profiler.TraceAnnotation(ANNOTATION):
        for _ in range(EXECUTIONS - 1):
            run()
        jax.block_until_ready(run())
    return analyze(read_trace(folder), executions=EXECUTIONS, since=ANNOTATION)


def record(run: Callable[[], Any], folder: Path) -> Profile | None:
    """Profiles a warm program. If that fails, prints why and returns None."""
    try:
        timelines = record_timelines(run, folder)
    except Exception as error:
        # Profilers fail in many ways, and what was timed before is worth more.
        print(f"no profile in {folder}: {error}", flush=True)
        return None
    return Profile(
        folder=folder.name,
        microseconds=tuple(t.duration / t.executions for t in timelines),
        communication=tuple(t.communication / t.executions for t in timelines),
        hidden_share=tuple(t.hidden_share for t in timelines),
        hidden_under_matmul_share=tuple(
            t.hidden_under_matmul / t.communication if t.communication else None for t in timelines
        ),
    )
