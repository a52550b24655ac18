"""How each GPU spent a profile, and how much of its communication other work hid."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.timeline.intervals import Interval, gaps, intersection, length, union
from benchmarks.timeline.trace import Event, Trace, TraceError


class Kind(StrEnum):
    """Kinds of work of a GPU. A matmul kernel that communicates counts as a matmul."""

    MATMUL = "matmul"
    KERNEL = "other kernel"
    LOCAL_COPY = "local copy"
    PEER_COPY = "peer copy"
    COLLECTIVE = "collective kernel"


COMPUTE = (Kind.MATMUL, Kind.KERNEL, Kind.LOCAL_COPY)
COMMUNICATION = (Kind.PEER_COPY, Kind.COLLECTIVE)

# cuBLAS, CUTLASS, XLA's Triton fusions around a dot, and Pallas, whose kernels here are matmuls.
_MATMUL = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|matmul|_dot|splitk|mosaic|pallas", re.I)
_COMMUNICATING_OP = re.compile(
    r"(collective-(permute|broadcast)|all-(gather|reduce|to-all)|reduce-scatter|send|recv)\b"
)


def kind_of(event: Event) -> Kind:
    name = event.name.lower()
    if "p2p" in name or "ptop" in name:
        return Kind.PEER_COPY
    if "memcpy" in name or "memset" in name:
        return Kind.LOCAL_COPY
    if "nccl" in name or _COMMUNICATING_OP.match(event.hlo_op):
        return Kind.COLLECTIVE
    return Kind.MATMUL if _MATMUL.search(name) else Kind.KERNEL


@dataclass(frozen=True)
class DeviceTimeline:
    """One GPU in a window of `executions` executions. Times are µs of the whole window.

    Attributes:
        busy: for each kind, the time in which at least one such event ran.
        idle: the time in which nothing ran.
        communication: the time in which a peer copy or a collective kernel ran.
        hidden_under_matmul: the part of `communication` in which a matmul ran too.
        hidden_under_compute: the part in which a matmul, another kernel or a local copy ran too.
    """

    device: str
    window: Interval
    executions: int
    events: list[Event]
    busy: dict[Kind, float]
    idle: float
    communication: float
    hidden_under_matmul: float
    hidden_under_compute: float

    @property
    def duration(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def hidden_share(self) -> float | None:
        """`hidden_under_compute` / `communication`; None where nothing was communicated."""
        return self.hidden_under_compute / self.communication if self.communication else None


def analyze(trace: Trace, *, executions: int, since: str) -> list[DeviceTimeline]:
    """All that started after the start of the host's last annotation of a name.

    Args:
      trace: of any program.
      executions: how many executions of the program that was.
      since: the name of a `jax.profiler.TraceAnnotation` or `StepTraceAnnotation`. What went before
        must have been blocked on.

    Raises:
      TraceError: if there is no such annotation, or nothing after it.
    """
    if executions < 1:
        raise TraceError(f"executions={executions}: give how many to average, at least 1")
    starts = [event.start for event in trace.host if event.name == since]
    if not starts:
        raise TraceError(
            f"since={since!r}: the host has no annotation of that name; wrap what you time in "
            f"jax.profiler.TraceAnnotation({since!r})"
        )
    return [
        _device_timeline(device, events, _window_since(max(starts), events), executions)
        for device, events in trace.devices.items()
    ]


def _window_since(start: float, events: list[Event]) -> Interval:
    later = [event for event in events if event.start >= start]
    if not later:
        raise TraceError("no GPU worked after the annotation; block on the result inside it")
    return later[0].start, max(event.end for event in later)


def _device_timeline(
    device: str, events: list[Event], window: Interval, executions: int
) -> DeviceTimeline:
    events = [event for event in events if window[0] <= event.start < window[1]]
    by_kind = {kind: _times(event for event in events if kind_of(event) is kind) for kind in Kind}
    compute, communication = (
        union(interval for kind in kinds for interval in by_kind[kind])
        for kinds in (COMPUTE, COMMUNICATION)
    )
    return DeviceTimeline(
        device=device,
        window=window,
        executions=executions,
        events=events,
        busy={kind: length(times) for kind, times in by_kind.items()},
        idle=length(gaps(_times(events), window)),
        communication=length(communication),
        hidden_under_matmul=length(intersection(communication, by_kind[Kind.MATMUL])),
        hidden_under_compute=length(intersection(communication, compute)),
    )


def _times(events: Iterable[Event]) -> list[Interval]:
    return union((event.start, event.end) for event in events)


@dataclass(frozen=True)
class Row:
    """Events of one kind and name, on an average GPU in one execution. Times are µs.

    `hidden` is the share of the time in which compute ran too; None where it is compute itself.
    `hlo_op` is the name of the instruction without its number, if it says more than the kernel's.
    """

    kind: str
    name: str
    hlo_op: str
    count: float
    total: float
    hidden: float | None = None


def rows(timelines: list[DeviceTimeline]) -> list[Row]:
    """Time by kernel, the longest first. Idle time counts for the kernel that ended it."""
    events: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    covered: dict[tuple[str, str, str], float] = defaultdict(float)
    for timeline in timelines:
        compute = _times(event for event in timeline.events if kind_of(event) in COMPUTE)
        for event in timeline.events:
            kind = kind_of(event)
            key = (str(kind), kernel_name(event.name), _instruction(event))
            events[key].append(event.duration)
            if kind in COMMUNICATION:
                covered[key] += length(intersection([(event.start, event.end)], compute))
        for (start, end), event in _idle(timeline):
            events["idle", f"before {kernel_name(event.name)}", _instruction(event)].append(
                end - start
            )
    share = sum(timeline.executions for timeline in timelines)
    table = []
    for key, durations in events.items():
        total = sum(durations)
        hidden = covered[key] / total if key[0] in COMMUNICATION and total else None
        table.append(Row(*key, len(durations) / share, total / share, hidden))
    return sorted(table, key=lambda row: -row.total)


def _idle(timeline: DeviceTimeline) -> Iterable[tuple[Interval, Event]]:
    """Each gap, with the event that starts where it ends."""
    starting = {event.start: event for event in timeline.events}
    for gap in gaps(_times(timeline.events), timeline.window):
        yield gap, starting[gap[1]]


def kernel_name(name: str) -> str:
    """The kernel's name without parameters, template arguments and number.

    A template argument that is one plain word stays: CUTLASS keeps the kernel's real name there.
    """
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", name)
    name = re.sub(r"\((?!anonymous).*$", "", name)
    depth, kept = 0, []
    for part in re.split(r"(<|>)", re.sub(r"<([a-z]\w{9,})>", r"[\1]", name)):
        depth += (part == "<") - (part == ">")
        if depth == 0 and part != ">":
            kept.append(part)
    return re.sub(r"([_.]\d+)+$", "", "".join(kept)).strip() or name


def _instruction(event: Event) -> str:
    stem = re.sub(r"([_.]\d+)+$", "", event.hlo_op)
    same = stem.replace("-", "_") == kernel_name(event.name).replace("-", "_")
    return "" if same else stem
