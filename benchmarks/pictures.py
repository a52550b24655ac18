"""``python -m benchmarks picture``: how many times as fast, by devices and shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from benchmarks.internals import COMPUTE_ONLY, REFERENCE
from benchmarks.tables import Content, candidate_names, speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Baselines that are not this library: hatched.
BASELINES = ("windowed", "torch", "torch_async_tp")


@dataclass(frozen=True)
class Picture:
    """Draw reports, on any machine: give it report.json files, of 2 and of 4 GPUs for instance."""

    reports: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """report.json files of one benchmark."""
    output: Path | None = None
    """Where to write it, as .png, .svg or .pdf; default: report.png beside the first."""


def run(settings: Picture) -> Path:
    """Draws the reports; returns where.

    Raises:
      ValueError: for files that are not reports of one benchmark, or without matplotlib.
    """
    contents = [_read(path) for path in settings.reports]
    benchmarks = {content["benchmark"] for content in contents}
    if len(benchmarks) != 1:
        named = ", ".join(sorted(benchmarks)) or "none"
        raise ValueError(f"reports: expected one or more of one benchmark, and they are of {named}")
    path = settings.output or settings.reports[0].with_suffix(".png")
    save_picture(contents, path)
    print(path)
    return path


def save_picture(contents: Sequence[Content], path: Path) -> None:
    """Draws reports of one benchmark.

    Raises:
      ValueError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib; install it, or draw report.json where it is installed"
        ) from error
    panels = _panels(contents)
    directions = list(dict.fromkeys(direction for direction, _ in panels))
    titles = list(dict.fromkeys(title for _, title in panels))
    figure = Figure(figsize=(1 + 6.5 * len(titles), 4 * len(directions)), layout="constrained")
    grid = figure.subplots(len(directions), len(titles), squeeze=False, sharey="row")
    draw = _draw_ops if contents[0]["benchmark"] == "ops" else _draw_bars
    for (direction, title), cases in panels.items():
        axes = grid[directions.index(direction)][titles.index(title)]
        draw(axes, cases)
        axes.set_title(f"{title}, {direction.replace('_', ' and ')}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.savefig(path, dpi=160)


def _read(path: Path) -> Content:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"reports: {str(path)!r}: {error}") from error
    if not (isinstance(content, dict) and {"benchmark", "environment", "cases"} <= content.keys()):
        raise ValueError(f"reports: {str(path)!r} is not a benchmark's report.json")
    return content


def _panels(contents: Sequence[Content]) -> dict[tuple[str, str], list[Content]]:
    """Cases by direction, and by devices."""
    panels: dict[tuple[str, str], list[Content]] = {}
    for content in contents:
        kind = content["environment"]["devices"][0]
        for case in content["cases"]:
            key = case.get("direction", "step"), f"{case['devices']} × {kind}"
            panels.setdefault(key, []).append(case)
    return panels


def _draw_bars(axes: Axes, cases: Sequence[Content]) -> None:
    """A group of bars for each case; the compute-only bound is a line above each."""
    taking_part = candidate_names({"cases": cases})
    baseline = "baseline" if "baseline" in taking_part else REFERENCE.name
    names = [
        name
        for name in taking_part
        if name not in (baseline, COMPUTE_ONLY) and any(speed_up(c, name, baseline) for c in cases)
    ]
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        bars = [(j, ratio) for j, c in enumerate(cases) if (ratio := speed_up(c, name, baseline))]
        axes.bar(
            [j - 0.4 + (i + 0.5) * width for j, _ in bars],
            [ratio for _, ratio in bars],
            width,
            label=name,
            color=f"C{i}",
            hatch="///" if name in BASELINES else None,
            edgecolor="white",
        )
    bounds = [
        (j, ratio)
        for j, case in enumerate(cases)
        if (ratio := speed_up(case, COMPUTE_ONLY, baseline))
    ]
    axes.hlines(
        [ratio for _, ratio in bounds],
        [j - 0.45 for j, _ in bounds],
        [j + 0.45 for j, _ in bounds],
        color="black",
        label="compute-only bound",
    )
    axes.axhline(1, color="gray", linestyle=":", label=baseline)
    axes.set_xticks(range(len(cases)), [_label(case) for case in cases])
    axes.set_ylabel(f"times as fast as {baseline}")
    axes.set_ylim(bottom=0)


def _draw_ops(axes: Axes, cases: Sequence[Content]) -> None:
    """A point for each case, by rows."""
    for name, marker in ((COMPUTE_ONLY, "_"), ("auto", "o")):
        points = [(c["rows"], ratio) for c in cases if (ratio := speed_up(c, name, REFERENCE.name))]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=name, alpha=0.7)
    axes.axhline(1, color="gray", linestyle=":", label=REFERENCE.name)
    rows = [case["rows"] for case in cases]
    axes.set_xlim(min(rows) / 1.5, max(rows) * 1.5)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("M")
    axes.set_ylabel("times as fast as xla")


def _label(case: dict[str, Any]) -> str:
    """A case's name without what the panel says."""
    return case["name"].removesuffix(case.get("direction", "")).strip()
