"""Where the time of a profile goes: `python -m benchmarks.timeline TRACE_DIRECTORY`."""

from benchmarks.timeline.analysis import DeviceTimeline, Row, analyze, kind_of, rows
from benchmarks.timeline.picture import save_picture
from benchmarks.timeline.trace import Event, Trace, TraceError, read_trace

__all__ = [
    "DeviceTimeline",
    "Event",
    "Row",
    "Trace",
    "TraceError",
    "analyze",
    "kind_of",
    "read_trace",
    "rows",
    "save_picture",
]
