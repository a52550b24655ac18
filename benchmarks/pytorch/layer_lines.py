"""What the commands share that time PyTorch's layers, each a line of the output."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pytorch.runner import time_pytorch


def parser_of(module: str, layer_from: Callable, names: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a command.

    Args:
      module: its name in this folder.
      layer_from: makes a layer from an argument.
      names: the candidates.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.pytorch.{module}")
    parser.add_argument("--layers", type=layer_from, nargs="+", required=True)
    parser.add_argument("--candidates", choices=names, nargs="+", default=names)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--groups", type=int, default=9)
    parser.add_argument("--group-seconds", type=float, default=0.1)
    parser.add_argument("--limit-seconds", type=float, default=420)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser


def measure(parsed: argparse.Namespace) -> int:
    """Prints a line for each result, and writes all of them; returns the exit status."""
    content: dict[str, Any] = {"results": [], "incomplete": []}
    for results, reason in _results(parsed):
        content["results"] += results
        content["incomplete"] += [reason] if reason else []
        for line in lines(results, reason):
            print(line, flush=True)
        if parsed.output:
            parsed.output.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if content["incomplete"] else 0


def line_of(result: dict[str, Any]) -> str:
    """A result in words."""
    start = f"{result['name']:<30} {result['candidate']:<17} {result['options']:<15}"
    if "failure" in result:
        return f"{start} failed: {result['failure']}"
    first, median, third = quartiles(result["samples"])
    return (
        f"{start} {1e3 * median:8.3f} ms [{1e3 * first:.3f}, {1e3 * third:.3f}]  "
        f"{result['peak_bytes'] / 2**30:6.2f} GiB  error {result['relative_error']:.2g}"
    )


def quartiles(samples: Sequence[float]) -> tuple[float, ...]:
    if len(samples) < 2:
        return (*samples,) * 3
    return tuple(statistics.quantiles(samples, n=4, method="inclusive"))


def lines(results: Sequence[dict[str, Any]], reason: str | None) -> Iterator[str]:
    yield from map(line_of, results)
    if reason:
        yield f"incomplete: {reason}"


def _results(parsed: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], str | None]]:
    """The results of each layer. Each has its own processes, which the others outlive."""
    end = time.monotonic() + parsed.limit_seconds
    for layer in parsed.layers:
        seconds_left = end - time.monotonic()
        if seconds_left <= 0:
            yield [], f"{layer['name']}: the time was over before its turn"
            continue
        results, reason = time_pytorch(
            [{**layer, "candidates": list(parsed.candidates)}],
            devices=parsed.devices,
            platform=parsed.platform,
            dtype="bfloat16",
            groups=parsed.groups,
            group_seconds=parsed.group_seconds,
            limit_seconds=seconds_left,
        )
        yield results, reason and f"{layer['name']}: {reason}"
