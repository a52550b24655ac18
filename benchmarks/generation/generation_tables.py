"""The tables of `benchmarks.generation.generation`."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.measuring.tables import table
from benchmarks.pytorch import GENERATION_NAMES

#: What the faster of counts, by what it is called.
_GROUPS = {"JAX's collectives": ("plain", "xla", "baseline"), "PyTorch": GENERATION_NAMES}


def rates(content: dict[str, Any]) -> str:
    """Tokens per second of all candidates."""
    header = ["batch", "", "prefill tokens/s", "decode tokens/s", "ms", "spread", "of floor"]
    lines = []
    for case in content["cases"]:
        for name, samples in case["times"]["decode"].items():
            decode, prefill = np.array(samples), case["times"]["prefill"].get(name)
            one = float(np.median(decode))
            read = case["batch"] * case["prompt"] / np.median(prefill) if prefill else None
            lines.append(
                [
                    str(case["batch"]),
                    name,
                    "–" if read is None else f"{read:,.0f}",
                    f"{case['batch'] / one:,.0f}",
                    f"{1e3 * one:.3f}",
                    f"{(decode.max() - decode.min()) / one:.1%}",
                    f"{one / case['floor']:.2f}",
                ]
            )
    return f"Greedy tokens. The floor reads weights and cache.\n\n{table(header, lines)}"


def speedups(content: dict[str, Any]) -> str:
    """How many times as fast `auto` is as others."""
    parts = [
        (str(case["batch"]), part, {name: float(np.median(t)) for name, t in times.items()})
        for case in content["cases"]
        for part, times in case["times"].items()
        if "auto" in times
    ]
    others = list(dict.fromkeys(name for *_, times in parts for name in times if name != "auto"))
    if not others:
        return ""
    columns = {name: (name,) for name in others}
    columns |= {f"fastest of {name}": names for name, names in _GROUPS.items()}

    def ratio(times: dict[str, float], names: tuple[str, ...]) -> str:
        found = [times[name] for name in names if name in times]
        return f"{min(found) / times['auto']:.2f}×" if found else "–"

    lines = [
        [batch, part, *(ratio(times, names) for names in columns.values())]
        for batch, part, times in parts
    ]
    title = "How many times as fast `auto` is as each other candidate."
    return f"{title}\n\n{table(['batch', '', *columns], lines)}"


def notes(content: dict[str, Any]) -> str:
    """How PyTorch was fastest, and what failed."""
    lines = []
    for case in content["cases"]:
        for name, text in (case.get("options", {}) | case.get("failures", {})).items():
            tried = case.get("tried", {}).get(name, {})
            trials = ", ".join(f"{what} {1e3 * seconds:.3f}" for what, seconds in tried.items())
            lines.append(
                f"- batch {case['batch']}, {name}: {text}" + f" (ms: {trials})" * bool(tried)
            )
    return "\n".join(lines)


SECTIONS = [rates, speedups, notes]
