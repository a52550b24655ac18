"""Markdown from a report's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collective_matmul.backends import BACKENDS

Content = dict[str, Any]

_GIB = 2**30


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column holds names, the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_up(case: Content, name: str, over: str) -> float | None:
    """How many times as fast as another contender, or None where either has no times."""
    try:
        return case["contenders"][over]["median"] / case["contenders"][name]["median"]
    except KeyError:
        return None


def contender_names(content: Content) -> list[str]:
    """All that took part in any case, in their order."""
    return list(dict.fromkeys(name for case in content["cases"] for name in case["contenders"]))


def implementations(result: Content) -> list[str]:
    """What carries out the ops of a program."""
    return list(dict.fromkeys(text.partition(":")[0] for text in result["decisions"]))


def title(content: Content) -> str:
    """The benchmark and its devices."""
    about = content["environment"]
    kinds = ", ".join(sorted(set(about["devices"])))
    return f"# {content['benchmark']}: {len(about['devices'])} × {kinds}"


def environment(content: Content) -> str:
    """What was measured on, and how."""
    about, settings = content["environment"], content["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['started'][:10]}. Python {about['python']}, {versions}, one process."]
    if about["gpus"]:
        gpu = about["gpus"][0]
        lines.append(
            f"Driver {gpu['driver_version']}, power limit {gpu['power.limit']}; SM clock, power and"
            f" temperature (°C) of the first GPU at work: {_over_cases(content)}."
        )
    lines.append(
        f"Medians of {settings['groups']} timed groups, in which the contenders take turns;"
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
    """Every case × contender."""

    def cell(case: Content, name: str) -> str:
        result = case["contenders"].get(name, {})
        if "median" not in result:
            return "failed" if result.get("failure") else ""
        low, high = 1e3 * result["low"], 1e3 * result["high"]
        ratio = speed_up(case, name, "baseline")
        times_baseline = "" if ratio is None or name == "baseline" else f", {ratio:.2f}×"
        return f"{1e3 * result['median']:.3f} [{low:.3f}, {high:.3f}]{times_baseline}"

    if not _timed(content):
        return ""
    return "## Time\n\nms, [least, most], and how many times as fast as the baseline.\n\n" + _grid(
        content, cell
    )


def throughput(content: Content) -> str:
    """Tokens per second and model FLOP utilization, of training steps."""

    def cell(case: Content, name: str) -> str:
        seconds = case["contenders"].get(name, {}).get("median")
        if seconds is None:
            return ""
        rate = case["tokens_per_step"] / seconds / case["devices"]
        peak = case["peak_flops"]
        utilization = "" if peak is None else f", {rate * case['flops_per_token'] / peak:.1%}"
        return f"{rate:,.0f}{utilization}"

    if not all("tokens_per_step" in case for case in content["cases"]):
        return ""
    return "## Throughput\n\nTokens per second and device, model FLOP utilization.\n\n" + _grid(
        content, cell
    )


def over_ceiling(content: Content) -> str:
    """Time over that of the same program without communication."""

    def cell(case: Content, name: str) -> str:
        ratio = speed_up(case, "ceiling", name)
        return "" if ratio is None else f"{ratio:.3f}"

    if "ceiling" not in contender_names(content) or not _timed(content):
        return ""
    return "## Time over the ceiling\n\nThe ceiling is the same program with nothing" + (
        " communicated.\n\n" + _grid(content, cell, without="ceiling")
    )


def memory(content: Content) -> str:
    """Temporary memory, and by how many chunks it is more than bulk's."""

    def cell(case: Content, name: str) -> str:
        result = case["contenders"].get(name, {})
        temporary = result.get("temporary_bytes")
        if temporary is None:
            return ""
        bulk = case["contenders"].get("xla", {}).get("temporary_bytes")
        if bulk is None or "chunk_bytes" not in case or name == "xla":
            return f"{temporary / _GIB:.3f}"
        return f"{temporary / _GIB:.3f}, {(temporary - bulk) / case['chunk_bytes']:+.2f}"

    return (
        "## Temporary memory\n\nGiB per device beyond arguments and results, and how many chunks"
        " (one device's rows) more than bulk.\n\n" + _grid(content, cell)
    )


def profiles(content: Content) -> str:
    """What share of its communication each contender hides, the least of all devices."""

    def cell(case: Content, name: str) -> str:
        profile = case["contenders"].get(name, {}).get("profile")
        if not profile:
            return ""
        shares = (profile["hidden_share"], profile["hidden_under_matmul_share"])
        least = [min((s for s in share if s is not None), default=None) for share in shares]
        return ", ".join("" if share is None else f"{share:.1%}" for share in least)

    if not any(r.get("profile") for c in content["cases"] for r in c["contenders"].values()):
        return ""
    return (
        "## Communication hidden\n\nShare of the time in which something is communicated and"
        " other work runs too, and in which a matmul does; the least of all devices.\n\n"
        + _grid(content, cell)
    )


def compilation(content: Content) -> str:
    """Seconds to trace and to compile."""

    def cell(case: Content, name: str) -> str:
        result = case["contenders"].get(name, {})
        if result.get("compile_seconds") is None:
            return ""
        return f"{result['trace_seconds']:.1f} + {result['compile_seconds']:.1f}"

    settings = content["settings"]
    alone = "one program after the other"
    beside = f"beside others in {settings['compile_threads']} threads"
    manner = alone if settings["compile_only"] else beside
    return f"## Compilation\n\nSeconds to trace, and to compile, {manner}.\n\n" + _grid(
        content, cell
    )


def options_tried(content: Content) -> str:
    """Every set of XLA options that was tried, the one taken marked."""
    lines = []
    for case in content["cases"]:
        for name, result in case["contenders"].items():
            tried = sorted(result["tried"].items(), key=lambda item: item[1])
            if tried:
                sets = "; ".join(f"{options} {1e3 * seconds:.3f}" for options, seconds in tried)
                lines.append(f"- {case['name']}, {name}: {sets}")
    if not lines:
        return ""
    return (
        "## XLA options tried\n\nms in a short trial; the first is the one that was timed.\n\n"
        + "\n".join(lines)
    )


def decisions(content: Content) -> str:
    """What auto chose and why."""
    lines = []
    for case in content["cases"]:
        for text, count in case["contenders"].get("auto", {}).get("decisions", {}).items():
            lines.append(f"- {case['name']}: {count} × {text}")
    return "## What auto chose\n\n" + "\n".join(lines) if lines else ""


def stand_ins(content: Content) -> str:
    """Where an implementation's column has times of ops that another carried out."""
    lines = [
        f"- {case['name']}, {name}: {count} × {text}"
        for case in content["cases"]
        for name, result in case["contenders"].items()
        for text, count in result.get("decisions", {}).items()
        if name in BACKENDS and text.partition(":")[0] != name
    ]
    heading = "## Carried out by another than the contender's name says"
    return f"{heading}\n\n" + "\n".join(lines) if lines else ""


def failures(content: Content) -> str:
    """Who has no times, and why."""
    lines = [
        f"- {case['name']}, {name}: {result['failure']}"
        for case in content["cases"]
        for name, result in case["contenders"].items()
        if result["failure"]
    ]
    return "## Failures\n\n" + "\n".join(lines) if lines else ""


def _timed(content: Content) -> bool:
    return any("median" in r for case in content["cases"] for r in case["contenders"].values())


def _grid(content: Content, cell: Callable[[Content, str], str], without: str = "") -> str:
    names = [name for name in contender_names(content) if name != without]
    rows = [[case["name"], *(cell(case, name) for name in names)] for case in content["cases"]]
    return table(["", *names], rows)
