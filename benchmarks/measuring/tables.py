"""Markdown from a report's JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.internals import COMPUTE_ONLY, REFERENCE

Content = dict[str, Any]

_GIB = 2**30


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column holds names, the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_up(case: Content, name: str, over: str) -> float | None:
    """The speed-up over another candidate, or None if either has no times."""
    try:
        return case["candidates"][over]["median"] / case["candidates"][name]["median"]
    except KeyError:
        return None


def candidate_names(content: Content) -> list[str]:
    """The candidates of any case, in their order."""
    return list(dict.fromkeys(name for case in content["cases"] for name in case["candidates"]))


def backends(result: Content) -> list[str]:
    """The backends that execute the ops of a program."""
    return list(dict.fromkeys(text.partition(":")[0] for text in result["decisions"]))


def title(content: Content) -> str:
    """The benchmark and its devices."""
    about = content["environment"]
    kinds = ", ".join(sorted(set(about["devices"])))
    return f"# {content['benchmark']}: {len(about['devices'])} × {kinds}"


def environment(content: Content) -> str:
    """The machine, and how it was measured."""
    about, settings = content["environment"], content["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['started'][:10]}. Python {about['python']}, {versions}."]
    if about["gpus"]:
        gpu = about["gpus"][0]
        lines.append(
            f"Driver {gpu['driver_version']}, power limit {gpu['power.limit']}; SM clock, power and"
            f" temperature (°C) of the first GPU at work: {_over_cases(content)}."
        )
    lines.append(
        f"Medians of {settings['groups']} timed groups, in which the candidates take turns;"
        f" {settings['dtype']}."
    )
    variables = " ".join(f"{name}={value}" for name, value in about["variables"].items())
    return "\n".join([*lines, "", "```", f"{variables} {about['command']}".strip(), "```"])


def _over_cases(content: Content) -> str:
    states = [case["gpus"][0] for case in content["cases"] if case["gpus"]]
    if not states:
        return "not known"
    spans = []
    for field in ("clocks.sm", "power.draw", "temperature.gpu"):
        values = sorted((state[field] for state in states), key=_number)
        spans += [values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"]
    return ", ".join(spans)


def _number(text: str) -> float:
    head = text.split()[0] if text.split() else ""
    return float(head) if head.replace(".", "", 1).isdigit() else 0.0


def times(content: Content) -> str:
    """The times of every case × candidate."""

    def cell(case: Content, name: str) -> str:
        result = case["candidates"].get(name, {})
        if "median" not in result:
            return "failed" if result.get("failure") else ""
        low, high = 1e3 * result["low"], 1e3 * result["high"]
        ratio = speed_up(case, name, "baseline")
        times_baseline = "" if ratio is None or name == "baseline" else f", {ratio:.2f}×"
        return f"{1e3 * result['median']:.3f} [{low:.3f}, {high:.3f}]{times_baseline}"

    return "## Time\n\nms, [least, most], and how many times as fast as the baseline.\n\n" + grid(
        content, cell
    )


def training_steps(content: Content) -> str:
    """Makes the table of training steps' times, with a row for each candidate of each case."""
    rows = []
    for case in content["cases"]:
        for name, result in case["candidates"].items():
            if "median" not in result or "tokens_per_step" not in case:
                continue
            rate = case["tokens_per_step"] / result["median"] / case["devices"]
            share = rate * case["flops_per_token"] / (case["peak_flops"] or math.inf)
            times = [f"{1e3 * result[key]:.1f}" for key in ("median", "low", "high")]
            row = [case["name"], name, *times, f"{rate:,.0f}", f"{share:.1%}", case["remat"]]
            # A report has NaN and infinities as text.
            losses = " → ".join(f"{float(loss):.4f}" for loss in result["losses"][::7])
            norm = result.get("gradient_norm")
            row += [f"{(result['peak_bytes'] or 0) / _GIB:.1f}", losses]
            rows.append([*row, "" if norm is None else f"{float(norm):.4f}"])
    header = ["", "candidate", "ms", "least", "most", "tokens/s", "MFU", "remat", "GiB", "loss"]
    header.append("gradient norm")
    about = (
        "## Training steps\n\nTokens per second and device, peak memory of a device, loss of the"
        " first step and the eighth, gradient norm of the first. Candidates of JAX take that step"
        " from the same parameters. PyTorch runs before JAX, one candidate after the other.\n\n"
    )
    return about + table(header, rows) if rows else ""


def over_compute_only(content: Content) -> str:
    """Time over that of the same program without communication."""

    def cell(case: Content, name: str) -> str:
        ratio = speed_up(case, COMPUTE_ONLY, name)
        return "" if ratio is None else f"{ratio:.3f}"

    if COMPUTE_ONLY not in candidate_names(content):
        return ""
    return "## Time over the compute-only bound\n\nThe bound is the same program without" + (
        " communication.\n\n" + grid(content, cell, without=COMPUTE_ONLY)
    )


def over_pytorch(content: Content) -> str:
    """How many times as fast as each of PyTorch's candidates the others are."""
    theirs = [name for name in candidate_names(content) if name.startswith("torch")]
    rows = []
    for case in content["cases"]:
        for over in theirs:
            ratios = {
                name: ratio
                for name in case["candidates"]
                if name not in (*theirs, COMPUTE_ONLY)
                and (ratio := speed_up(case, name, over)) is not None
            }
            cells = [f"{name} {ratio:.2f}×" for name, ratio in ratios.items()]
            if cells:
                rows.append([case["name"], over, ", ".join(cells)])
    about = "## Over PyTorch\n\nTimes of PyTorch's candidates over those of the others.\n\n"
    return about + table(["", "over", "speed-up"], rows) if rows else ""


def memory(content: Content) -> str:
    """Temporary memory, and by how many chunks it is more than xla's."""

    def cell(case: Content, name: str) -> str:
        result = case["candidates"].get(name, {})
        temporary = result.get("temporary_bytes")
        if temporary is None:
            return ""
        xla = case["candidates"].get(REFERENCE.name, {}).get("temporary_bytes")
        if xla is None or "chunk_bytes" not in case or name == REFERENCE.name:
            return f"{temporary / _GIB:.3f}"
        return f"{temporary / _GIB:.3f}, {(temporary - xla) / case['chunk_bytes']:+.2f}"

    return (
        "## Temporary memory\n\nGiB per device beyond arguments and results, and how many chunks"
        " (one device's rows) more than xla.\n\n" + grid(content, cell)
    )


def profiles(content: Content) -> str:
    """The share of its communication that each candidate hides, the least of all devices."""

    def cell(case: Content, name: str) -> str:
        profile = case["candidates"].get(name, {}).get("profile")
        if not profile:
            return ""
        shares = (profile["hidden_share"], profile["hidden_under_matmul_share"])
        least = [min((s for s in share if s is not None), default=None) for share in shares]
        return ", ".join("" if share is None else f"{share:.1%}" for share in least)

    if not any(r.get("profile") for c in content["cases"] for r in c["candidates"].values()):
        return ""
    return (
        "## Communication hidden\n\nShare of the time in which something is communicated and"
        " other work runs too, and in which a matmul does; the least of all devices.\n\n"
        + grid(content, cell)
    )


def options_tried(content: Content) -> str:
    """Every set of XLA options and every way to run PyTorch that was tried."""
    lines = []
    for case in content["cases"]:
        for name, result in case["candidates"].items():
            tried = sorted(result["tried"].items(), key=lambda item: item[1])
            if tried:
                sets = "; ".join(f"{options} {1e3 * seconds:.3f}" for options, seconds in tried)
                lines.append(f"- {case['name']}, {name}: {sets}")
    if not lines:
        return ""
    return (
        "## Options tried\n\nms in a short trial; the first is the one that was timed.\n\n"
        + "\n".join(lines)
    )


def decisions(content: Content) -> str:
    """The choices of auto and their reasons, and the operators that PyTorch's compiler fused."""
    chosen, fused = [], []
    for case in content["cases"]:
        for name, result in case["candidates"].items():
            if name.startswith("torch"):
                fused += _counted(f"{case['name']}, {name}", result)
            elif name == "auto" or name.startswith("auto_fp8"):
                chosen += _counted(f"{case['name']}, {name}", result)
    sections = []
    if chosen:
        sections.append("## What auto chose\n\n" + "\n".join(chosen))
    if fused:
        about = "Number of operators in the compiled layer, gradients included."
        sections.append("\n\n".join(["## What PyTorch fused", about, "\n".join(fused)]))
    return "\n\n".join(sections)


def _counted(subject: str, result: Content) -> list[str]:
    decided = result.get("decisions") or {}
    return [f"- {subject}: {count} × {text}" for text, count in decided.items()]


def failures(content: Content) -> str:
    """The candidates without times, and why."""
    lines = [
        f"- {case['name']}, {name}: {result['failure']}"
        for case in content["cases"]
        for name, result in case["candidates"].items()
        if result["failure"]
    ]
    return "## Failures\n\n" + "\n".join(lines) if lines else ""


def grid(content: Content, cell: Callable[[Content, str], str], without: str = "") -> str:
    """A table with a row for each case and a column for each candidate."""
    names = [name for name in candidate_names(content) if name != without]
    rows = [[case["name"], *(cell(case, name) for name in names)] for case in content["cases"]]
    return table(["", *names], rows)
