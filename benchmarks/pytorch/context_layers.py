"""``python -m benchmarks.pytorch.context_layers``: times PyTorch's attention layers whose sequence
is divided over devices, a line for each. They need GPUs: on CPUs, `context_parallel` has no kernel.
"""

from __future__ import annotations

import sys

from benchmarks.pytorch import CONTEXT_NAMES
from benchmarks.pytorch.layer_lines import LayerCommand


def _unlike(layer: dict[str, int]) -> str | None:
    if layer["heads"] % layer["key_value_heads"]:
        return "expected as many query heads for each head of keys and values"
    return None


def _undivided(layer: dict[str, int], devices: int) -> str | None:
    if layer["tokens"] % (2 * devices):
        return f"{layer['tokens']} tokens cannot be divided into {2 * devices} equal chunks"
    return None


COMMAND = LayerCommand(
    "context_layers",
    CONTEXT_NAMES,
    ("tokens", "width", "heads", "key_value_heads", "head_size"),
    "8b:32768:4096:32:8:128",
    _unlike,
    _undivided,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
