"""The command line: from arguments to a benchmark."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks import configs, ops, pictures, stack, tilings, train
from benchmarks.report import Report
from benchmarks.settings import choose_platform

_BENCHMARKS: dict[str, tuple[type, Callable[[Any], Report]]] = {
    "ops": (ops.Ops, ops.run),
    "stack": (stack.Stack, stack.run),
    "train": (train.Train, train.run),
}
#: These print and write their results by themselves.
_OTHERS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "picture": (pictures.Picture, pictures.run),
    "configs": (configs.Configs, configs.run),
    "tilings": (tilings.Tilings, tilings.run),
}


def main(arguments: Sequence[str]) -> None:
    """``python -m benchmarks``. Exits with 2 after one sentence for what does not fit."""
    settings = tyro.extras.subcommand_cli_from_dict(
        {name: settings for name, (settings, _) in (_OTHERS | _BENCHMARKS).items()},
        args=list(arguments),
        prog="python -m benchmarks",
        description="Times the ops, layers and training steps beside baselines; tunes kernels.",
    )
    try:
        for kind, run in _OTHERS.values():
            if isinstance(settings, kind):
                run(settings)
                return
        choose_platform(settings)
        report = dict(_BENCHMARKS.values())[type(settings)](settings)
        if importlib.util.find_spec("matplotlib") and report.content["cases"]:
            pictures.save_picture([report.content], report.folder / "report.png")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
