"""The command line: from arguments to a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks.generation import generation
from benchmarks.layers import attention, context, experts
from benchmarks.measuring.settings import Settings, choose_platform
from benchmarks.ops import configs, fp8_matmuls, ops, tilings
from benchmarks.processes import processes
from benchmarks.step import stack, step, train

_BENCHMARKS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "ops": (ops.Ops, ops.run),
    "stack": (stack.Stack, stack.run),
    "train": (train.Train, train.run),
    "step": (step.Step, step.run),
    "generation": (generation.Generation, generation.run),
    "attention": (attention.AttentionKernels, attention.run),
    "context": (context.Context, context.run),
    "experts": (experts.Experts, experts.run),
    "fp8_matmuls": (fp8_matmuls.Fp8Matmuls, fp8_matmuls.run),
    "processes": (processes.Processes, processes.run),
    "configs": (configs.Configs, configs.run),
    "tilings": (tilings.Tilings, tilings.run),
}


#: These look for devices in processes of their own.
_IN_OTHER_PROCESSES = (configs.Configs, processes.Processes)


def main(arguments: Sequence[str]) -> None:
    """``python -m benchmarks``. Exits with 2 after one sentence for what does not fit."""
    settings = tyro.extras.subcommand_cli_from_dict(
        {name: settings for name, (settings, _) in _BENCHMARKS.items()},
        args=list(arguments),
        prog="python -m benchmarks",
        description="Times ops, layers and training steps beside baselines; tunes kernels.",
    )
    try:
        if isinstance(settings, Settings) and not isinstance(settings, _IN_OTHER_PROCESSES):
            choose_platform(settings)
        dict(_BENCHMARKS.values())[type(settings)](settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
