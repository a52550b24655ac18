"""Reads what `jax.profiler.trace` recorded: the work of every GPU, and the host's annotations.

A plane is one device or the host, a line is one stream or thread. Times are microseconds on one
clock, which the profiler shares between the host and all devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

# Beside the streams, a plane may hold lines that sum them up: counted too, all would count twice.
_STREAM = "Stream"
_SUMMARIES = ("XLA", "Steps", "Framework", "Source", "Launch", "CUPTI", "Async", "_")


class TraceError(ValueError):
    """There is no trace at that place, or it holds nothing that can be analysed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or a copy on a GPU, or an annotation on the host. `start` and `end` are in µs."""

    plane: str
    line: str
    name: str
    start: float
    end: float
    hlo_op: str = ""

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """The events of each GPU in order of their start, and those of the host."""

    devices: dict[str, list[Event]]
    host: list[Event]


def read_trace(path: Path | str) -> Trace:
    """Reads the newest profile under `path`, the directory that `jax.profiler.trace` was given.

    `path` may also be one .xplane.pb file.

    Raises:
      TraceError: if there is no profile, or if it has no work of GPUs.
    """
    events = [event for file in _newest_files(Path(path)) for event in _read_xplane(file)]
    host = [event for event in events if "device:" not in event.plane]
    devices: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start):
        if "GPU" in event.plane:
            devices.setdefault(event.plane, []).append(event)
    if not devices:
        planes = ", ".join(sorted({event.plane for event in events})) or "none"
        raise TraceError(
            f"{path}: the trace holds no work of GPUs, only of: {planes}; profile on a machine "
            "with GPUs, and block on the result before the trace is stopped"
        )
    return Trace({name: _work(devices[name]) for name in sorted(devices)}, host)


def _newest_files(path: Path) -> list[Path]:
    """The files of the newest profile, one per host."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise TraceError(
            f"{path}: no .xplane.pb there; give the directory that jax.profiler.trace wrote to"
        )
    return sorted(file for file in found if file.parent == found[-1].parent)


def _work(events: list[Event]) -> list[Event]:
    streams = [event for event in events if event.line.startswith(_STREAM)]
    return streams or [event for event in events if not event.line.startswith(_SUMMARIES)]


def _read_xplane(path: Path) -> Iterator[Event]:
    profile = ProfileData.from_file(str(path))
    with warnings.catch_warnings():
        # The first use of each of ProfileData's types warns that it has no __module__.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            is_device = "device:" in plane.name
            for line in plane.lines:
                for event in line.events:
                    # Python's own function calls, most of the host's events, start with a "$".
                    if not event.name.startswith("$"):
                        # Only work on devices has an instruction.
                        hlo_op = str(dict(event.stats).get("hlo_op", "")) if is_device else ""
                        start, end = event.start_ns / 1e3, event.end_ns / 1e3
                        yield Event(plane.name, line.name, event.name, start, end, hlo_op)
