"""``python -m benchmarks.pytorch.context_layers``: times PyTorch's attention layers whose sequence
is divided over devices, a line for each. They need GPUs: on CPUs, `context_parallel` has no kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pytorch import CONTEXT_NAMES
from benchmarks.pytorch.layer_lines import measure, parser_of

_SIZES = ("tokens", "width", "heads", "key_value_heads", "head_size")


def layer_from(text: str) -> dict[str, Any]:
    """A layer from "NAME:S:h:N:K:H", with the tokens of the whole sequence."""
    name, *sizes = text.split(":")
    if len(sizes) != len(_SIZES) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME:{':'.join(_SIZES)}, such as 8b:32768:4096:32:8:128"
        )
    layer = dict(zip(_SIZES, map(int, sizes), strict=True))
    if layer["heads"] % layer["key_value_heads"]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected as many query heads for each head of keys and values"
        )
    return {"name": name, **layer}


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("context_layers", layer_from, CONTEXT_NAMES)
    parsed = parser.parse_args(arguments)
    for layer in parsed.layers:
        if layer["tokens"] % (2 * parsed.devices):
            parser.error(
                f"--devices {parsed.devices}: {layer['tokens']} tokens cannot be divided into"
                f" {2 * parsed.devices} equal chunks"
            )
    return measure(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
