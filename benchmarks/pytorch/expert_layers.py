"""``python -m benchmarks.pytorch.expert_layers``: times PyTorch's expert layers, a line for each.

The layers are those of `benchmarks.expert_programs.ExpertLayer`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pytorch import EXPERT_NAMES
from benchmarks.pytorch.runner import time_pytorch

_SIZES = ("tokens", "width", "hidden", "experts", "choices")


def layer_from(text: str) -> dict[str, Any]:
    """A layer from "NAME:T:h:f:E:k"."""
    name, *sizes = text.split(":")
    if len(sizes) != len(_SIZES) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME:{':'.join(_SIZES)}, such as mixtral:8192:4096:14336:8:2"
        )
    layer = dict(zip(_SIZES, map(int, sizes), strict=True))
    if layer["choices"] > layer["experts"]:
        raise argparse.ArgumentTypeError(f"{text!r}: a token has more choices than experts")
    if layer["width"] % 8 or layer["hidden"] % 8:
        raise argparse.ArgumentTypeError(
            f"{text!r}: PyTorch's grouped_mm needs a width and hidden features that 8 divides"
        )
    return {"name": name, **layer}


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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch.expert_layers")
    parser.add_argument("--layers", type=layer_from, nargs="+", required=True)
    parser.add_argument("--candidates", choices=EXPERT_NAMES, nargs="+", default=EXPERT_NAMES)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--groups", type=int, default=9)
    parser.add_argument("--group-seconds", type=float, default=0.1)
    parser.add_argument("--limit-seconds", type=float, default=420)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parsed = parser.parse_args(arguments)
    for layer in parsed.layers:
        if layer["experts"] % parsed.devices:
            parser.error(
                f"--devices {parsed.devices}: does not divide the {layer['experts']} experts"
            )
    content: dict[str, Any] = {"results": [], "incomplete": []}
    for results, reason in _results(parsed):
        content["results"] += results
        content["incomplete"] += [reason] if reason else []
        for line in lines(results, reason):
            print(line, flush=True)
        if parsed.output:
            parsed.output.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 1 if content["incomplete"] else 0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
