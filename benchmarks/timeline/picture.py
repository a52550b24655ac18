"""Draws timelines: what the SMs and the copy engines of each GPU did, on one time axis."""

from __future__ import annotations

from pathlib import Path

from benchmarks.timeline.analysis import DeviceTimeline, Kind, kind_of

_LANES = {
    "copy engines": (Kind.PEER_COPY,),
    "collectives": (Kind.COLLECTIVE,),
    "compute": (Kind.LOCAL_COPY, Kind.KERNEL, Kind.MATMUL),
}
# Okabe and Ito's colours, which the colour-blind tell apart.
_COLORS = {
    Kind.MATMUL: "#0072B2",
    Kind.KERNEL: "#E69F00",
    Kind.LOCAL_COPY: "#CC79A7",
    Kind.PEER_COPY: "#009E73",
    Kind.COLLECTIVE: "#D55E00",
}


def save_picture(timelines: list[DeviceTimeline], path: Path | str, title: str = "") -> None:
    """Writes a picture of the timelines, one below the other, in the format of the path's suffix.

    Raises ImportError if matplotlib is not installed (the extra `plot`).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = [name for name, kinds in _LANES.items() if _used(timelines, kinds)]
    origin = min(timeline.window[0] for timeline in timelines)
    height = 0.6 + len(timelines) * (0.35 * len(lanes) + 0.35)
    figure = Figure(figsize=(14, height), layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for timeline, axes in zip(timelines, grid[:, 0], strict=True):
        for row, lane in enumerate(lanes):
            for kind in _LANES[lane]:
                bars = [
                    ((event.start - origin) / 1e3, event.duration / 1e3)
                    for event in timeline.events
                    if kind_of(event) is kind
                ]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLORS[kind], linewidth=0)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_title(describe(timeline), loc="left", fontsize="small")
    grid[-1, 0].set_xlabel("ms")
    kinds = [kind for kind in Kind if _used(timelines, (kind,))]
    patches = [Patch(color=_COLORS[kind], label=str(kind)) for kind in kinds]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=160)


def describe(timeline: DeviceTimeline) -> str:
    share = timeline.hidden_share
    hidden = "no communication" if share is None else f"{share:.1%} of the communication hidden"
    return f"{timeline.device.removeprefix('/device:')}: {timeline.duration / 1e3:.2f} ms, {hidden}"


def _used(timelines: list[DeviceTimeline], kinds: tuple[Kind, ...]) -> bool:
    return any(timeline.busy[kind] for timeline in timelines for kind in kinds)
