"""Markdown from the JSON of `ops`: where auto wins, and whether it ever loses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.comparison.candidates import AUTO
from benchmarks.internals import COMPUTE_ONLY, REFERENCE
from benchmarks.measuring.tables import Content, backends, candidate_names, speed_up, table

#: The share of xla's speed below which a case is a loss.
LOSS = 0.99

#: What the ratio is of cases that are not counted as "not xla".
_SAME = {
    "auto": "Where auto has xla for every op, the program is the same and the ratio 1.",
    "auto_fused": "Where it has xla for every op, the program differs in the compiler's options.",
}


def wins_by_rows(content: Content) -> str:
    """Auto against xla, by M and direction; and with fused kernels allowed, if both took part."""
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
    header = ["M", "cases", "not xla", "wins", "losses", "least", "mean", "most", "of bound"]
    return (
        f"## {name.capitalize()} against xla\n\nXla's time over {name}'s: least, geometric mean"
        f" and most of the cases. A loss is less than {LOSS}, a win more than {2 - LOSS:.2f}."
        f" {_SAME[name]} Of bound: the compute-only bound's time over {name}'s, geometric mean.\n\n"
        + table(header, [*rows, ["all", *total]])
    )


def _summary(cases: Sequence[Content], name: str) -> list[str] | None:
    compared = [(case, ratio) for case in cases if (ratio := speed_up(case, name, REFERENCE.name))]
    if not compared:
        return None
    ratios = [ratio for _, ratio in compared]
    other = [
        case for case, _ in compared if set(backends(case["candidates"][name])) != {REFERENCE.name}
    ]
    bounds = [ratio for case, _ in compared if (ratio := speed_up(case, name, COMPUTE_ONLY))]
    return [
        str(len(compared)),
        str(len(other)),
        str(sum(ratio > 2 - LOSS for ratio in ratios)),
        str(sum(ratio < LOSS for ratio in ratios)),
        f"{min(ratios):.3f}",
        f"{statistics.geometric_mean(ratios):.3f}",
        f"{max(ratios):.3f}",
        f"{statistics.geometric_mean(bounds):.3f}" if bounds else "",
    ]


def noise(content: Content) -> str:
    """The ratio of two times of one program."""
    again = [speed_up(case, f"{REFERENCE.name} again", REFERENCE.name) for case in content["cases"]]
    ratios = [ratio for ratio in again if ratio is not None]
    if not ratios:
        return ""
    listed = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    return f"## Noise\n\nXla's time over that of the same executable, timed again: {listed}."


def every_op(content: Content) -> str:
    """The time of every case × candidate."""
    names = [name for name in candidate_names(content) if name != f"{REFERENCE.name} again"]
    cases = sorted(
        content["cases"],
        key=lambda c: (c["direction"], c["op"], c["model"], c["layer"]["name"], c["rows"]),
    )

    def cell(case: Content, name: str) -> str:
        result = case["candidates"].get(name, {})
        if "median" not in result:
            return ""
        chosen = f" {', '.join(backends(result))}" if name in AUTO else ""
        return f"{1e6 * result['median'] / case['repetitions']:.1f}{chosen}"

    rows = [[case["name"], *(cell(case, name) for name in names)] for case in cases]
    return "## Every case\n\nµs for one op, forward or both ways.\n\n" + table(["", *names], rows)


SECTIONS = (wins_by_rows, noise, every_op)
