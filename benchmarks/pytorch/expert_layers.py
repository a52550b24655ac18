"""``python -m benchmarks.pytorch.expert_layers``: times PyTorch's expert layers, a line for each.

The layers are those of `benchmarks.layers.expert_programs.ExpertLayer`.
"""

from __future__ import annotations

import sys

from benchmarks.pytorch import EXPERT_NAMES
from benchmarks.pytorch.layer_lines import LayerCommand


def _unlike(layer: dict[str, int]) -> str | None:
    if layer["choices"] > layer["experts"]:
        return "a token has more choices than experts"
    if layer["width"] % 8 or layer["hidden"] % 8:
        return "PyTorch's grouped_mm needs a width and hidden features that 8 divides"
    return None


def _undivided(layer: dict[str, int], devices: int) -> str | None:
    if layer["experts"] % devices:
        return f"does not divide the {layer['experts']} experts"
    return None


COMMAND = LayerCommand(
    "expert_layers",
    EXPERT_NAMES,
    ("tokens", "width", "hidden", "experts", "choices"),
    "mixtral:8192:4096:14336:8:2",
    _unlike,
    _undivided,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
