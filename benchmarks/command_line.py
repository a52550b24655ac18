"""From arguments to a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks import block, ops, stack, train
from benchmarks.settings import choose_platform

_BENCHMARKS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "ops": (ops.Ops, ops.run),
    "block": (block.Block, block.run),
    "stack": (stack.Stack, stack.run),
    "train": (train.Train, train.run),
}


def main(arguments: Sequence[str]) -> None:
    """``python -m benchmarks``. Exits with 2 after one sentence for what does not fit."""
    settings = tyro.extras.subcommand_cli_from_dict(
        {name: settings for name, (settings, _) in _BENCHMARKS.items()},
        args=list(arguments),
        prog="python -m benchmarks",
        description="How long the collective matmuls take beside what they are measured by.",
    )
    choose_platform(settings)
    run = dict(_BENCHMARKS.values())[type(settings)]
    try:
        run(settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
