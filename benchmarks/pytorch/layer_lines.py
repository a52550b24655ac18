"""Shared by the commands that time PyTorch's layers, each a line of the output."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pytorch.runner import time_pytorch


@dataclass(frozen=True)
class LayerCommand:
    """A command that times layers of a kind.

    Attributes:
      module: its name in this folder.
      candidates: their names.
      sizes: names of the sizes of a layer.
      example: a layer on the command line, "NAME:SIZE:...".
      unlike: why there is no layer of some sizes, or None.
      undivided: why so many devices cannot share a layer, or None.
    """

    module: str
    candidates: Sequence[str]
    sizes: Sequence[str]
    example: str
    unlike: Callable[[dict[str, int]], str | None]
    undivided: Callable[[dict[str, int], int], str | None]

    def layer_from(self, text: str) -> dict[str, Any]:
        """A layer from "NAME:SIZE:..."."""
        name, *sizes = text.split(":")
        if len(sizes) != len(self.sizes) or not all(s.isdecimal() and int(s) for s in sizes):
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected NAME:{':'.join(self.sizes)}, such as {self.example}"
            )
        layer = dict(zip(self.sizes, map(int, sizes), strict=True))
        if reason := self.unlike(layer):
            raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
        return {"name": name, **layer}

    def main(self, arguments: Sequence[str]) -> int:
        """Prints a line for each result, and writes all of them; returns the exit status."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.pytorch.{self.module}")
        parser.add_argument("--layers", type=self.layer_from, nargs="+", required=True)
        parser.add_argument(
            "--candidates", choices=self.candidates, nargs="+", default=self.candidates
        )
        parser.add_argument("--devices", type=int, default=2)
        parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
        parser.add_argument("--groups", type=int, default=9)
        parser.add_argument("--group-seconds", type=float, default=0.1)
        parser.add_argument("--limit-seconds", type=float, default=420)
        parser.add_argument("--output", type=Path, help="a JSON file for the results")
        parsed = parser.parse_args(arguments)
        for layer in parsed.layers:
            if reason := self.undivided(layer, parsed.devices):
                parser.error(f"--devices {parsed.devices}: {reason}")
        content: dict[str, Any] = {"results": [], "incomplete": []}
        for results, reason in _results(parsed):
            content["results"] += results
            content["incomplete"] += [reason] if reason else []
            for line in (*map(line_of, results), *([f"incomplete: {reason}"] if reason else [])):
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
