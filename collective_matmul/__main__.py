"""``python -m collective_matmul tune``: measures the layers of known models on the devices here."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from collective_matmul.operands.format import FORMATS
from collective_matmul.ops.matmul.model_requests import LAYERS, ROWS, check_shapes, sites
from collective_matmul.tuning.tune import check_place, tune

SHAPES = "llama3-8b,llama3-70b,llama3-405b,llama3-heads,awkward"


def main(arguments: Sequence[str]) -> None:
    """Carries out a command line; one that asks for what cannot be ends with a sentence."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        check_shapes(parsed.shapes)
        _check_devices(parsed)
        devices = parsed.devices or jax.device_count()
        tune(
            list(sites(parsed.shapes, parsed.rows, devices, parsed.dtype, fp8=parsed.fp8)),
            implementations=parsed.implementations,
            path=parsed.output,
            groups=parsed.groups,
            seconds_per_group=parsed.seconds_per_group,
            limit_seconds=parsed.limit_seconds,
            again=parsed.again,
        )
    except ValueError as error:
        parser.error(str(error))


def _check_devices(parsed: argparse.Namespace) -> None:
    """Refuses to measure without GPUs, unless asked to, and then without a place for the times.

    Raises:
      ValueError: to refuse it.
    """
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda", "rocm") and not parsed.without_gpus:
        raise ValueError(
            f"JAX finds no GPU, only {platform} devices, where nothing runs under"
            " a matmul; add --without-gpus to measure them all the same"
        )
    check_place(jax.devices()[0], parsed.output, "add --output FILE")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m collective_matmul",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command = parser.add_subparsers(required=True, metavar="tune").add_parser(
        "tune",
        help="measure the layers of known models and save the table",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    commas = "separated by commas"
    add = command.add_argument
    add("--devices", type=int, default=0, help="size of the axis; 0 takes all devices there are")
    add("--shapes", type=names, default=SHAPES, help=f"{commas}: {', '.join(LAYERS)}")
    add("--rows", type=whole_numbers, default=",".join(map(str, ROWS)), help=f"global, {commas}")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of all")
    add(
        "--fp8",
        choices=tuple(FORMATS),
        help="format of operands, as a recipe of 8 bits; arrays if not given",
    )
    add("--implementations", type=names, help=f"{commas}; all if not given")
    add("--output", type=Path, help="of the table; in the user's cache if not given")
    add("--groups", type=int, default=5, help="timed groups for each site")
    add("--seconds-per-group", type=float, default=0.05, help="for each implementation")
    add("--limit-seconds", type=float, default=math.inf, help="begin no further site after that")
    add("--without-gpus", action="store_true", help="measure on a CPU, to try the command")
    add("--again", action="store_true", help="measure too what the table has already")
    return parser


def names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main(sys.argv[1:])
