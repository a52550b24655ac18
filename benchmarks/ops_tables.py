"""Markdown from the JSON of `ops`: where auto wins, and whether it ever loses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.contenders import AUTO
from benchmarks.tables import Content, contender_names, implementations, speed_up, table

#: Of bulk's speed. Less is a loss.
LOSS = 0.99

#: What is said of cases that are not counted as "not bulk".
_OF_BULK = {
    "auto": "Where auto has bulk for every op, the program is the same and the ratio 1.",
    "auto_fused": "Where it has bulk for every op, the program differs in the compiler's options.",
}


def wins_by_rows(content: Content) -> str:
    """Auto against bulk, by M and direction; and the same with fused kernels, if both took part."""
    sections = (_wins_of(content, name) for name in AUTO)
    return "\n\n".join(filter(None, sections))


def _wins_of(content: Content, name: str) -> str:
    rows = []
    for direction in dict.fromkeys(case["direction"] for case in content["cases"]):
        for m in sorted({case["rows"] for case in content["cases"]}):
            cases = [c for c in content["cases"] if (c["rows"], c["direction"]) == (m, direction)]
            if row := _summary(cases, name):
                rows.append([f"{m} {direction}", *row])
    total = _summary(content["cases"], name)
    if total is None:
        return ""
    header = ["M", "cases", "not bulk", "wins", "losses", "least", "mean", "most", "of ceiling"]
    return (
        f"## {name.capitalize()} against bulk\n\nBulk's time over {name}'s: least, geometric mean"
        f" and most of the cases. A loss is less than {LOSS}, a win more than {2 - LOSS:.2f}."
        f" {_OF_BULK[name]} Of ceiling: the ceiling's time over {name}'s, geometric mean.\n\n"
        + table(header, [*rows, ["all", *total]])
    )


def _summary(cases: Sequence[Content], name: str) -> list[str] | None:
    compared = [(case, ratio) for case in cases if (ratio := speed_up(case, name, "xla"))]
    if not compared:
        return None
    ratios = [ratio for _, ratio in compared]
    other = [case for case, _ in compared if not _is_bulk(case, name)]
    ceilings = [ratio for case, _ in compared if (ratio := speed_up(case, name, "ceiling"))]
    return [
        str(len(compared)),
        str(len(other)),
        str(sum(ratio > 2 - LOSS for ratio in ratios)),
        str(sum(ratio < LOSS for ratio in ratios)),
        f"{min(ratios):.3f}",
        f"{statistics.geometric_mean(ratios):.3f}",
        f"{max(ratios):.3f}",
        f"{statistics.geometric_mean(ceilings):.3f}" if ceilings else "",
    ]


def _is_bulk(case: Content, name: str) -> bool:
    return set(implementations(case["contenders"][name])) == {"xla"}


def noise(content: Content) -> str:
    """What two times of one program differ by."""
    ratios = [ratio for case in content["cases"] if (ratio := speed_up(case, "bulk again", "xla"))]
    if not ratios:
        return ""
    listed = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    return f"## Noise\n\nBulk's time over that of the same executable, timed again: {listed}."


def every_op(content: Content) -> str:
    """Every case: bulk's time, and how many times as fast the others are."""
    names = [name for name in contender_names(content) if name not in ("xla", "bulk again")]
    cases = sorted(
        content["cases"], key=lambda c: (c["direction"], c["projection"]["name"], c["rows"])
    )

    def cell(case: Content, name: str) -> str:
        ratio = speed_up(case, name, "xla")
        if ratio is None:
            return ""
        chosen = f" {', '.join(implementations(case['contenders'][name]))}" if name in AUTO else ""
        return f"{ratio:.3f}{chosen}"

    def bulk(case: Content) -> str:
        median = case["contenders"].get("xla", {}).get("median")
        return "" if median is None else f"{1e3 * median / case['repetitions']:.3f}"

    rows = [[c["name"], bulk(c), *(cell(c, name) for name in names)] for c in cases]
    return (
        "## Every case\n\nBulk's ms for one op, and its time over that of the others.\n\n"
        + table(["", "xla", *names], rows)
    )
