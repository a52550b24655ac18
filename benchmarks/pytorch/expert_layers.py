"""``python -m benchmarks.pytorch.expert_layers``: times PyTorch's expert layers, a line for each.

The layers are those of `benchmarks.layers.expert_programs.ExpertLayer`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pytorch import EXPERT_NAMES
from benchmarks.pytorch.layer_lines import measure, parser_of

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


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("expert_layers", layer_from, EXPERT_NAMES)
    parsed = parser.parse_args(arguments)
    for layer in parsed.layers:
        if layer["experts"] % parsed.devices:
            parser.error(
                f"--devices {parsed.devices}: does not divide the {layer['experts']} experts"
            )
    return measure(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
