"""Times the peers alone: `python -m benchmarks.peers --devices 4 --shapes 70B 8B small`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import tyro

from benchmarks.peers import PEERS, torch_stack
from benchmarks.programs import Direction
from benchmarks.settings import check_names
from benchmarks.stack import SHAPES, Stack


def main(
    devices: int,
    shapes: tuple[str, ...] = ("70B", "8B", "small"),
    directions: tuple[Direction, ...] = ("forward", "forward_backward"),
    layers: int = 0,
    sweep_m: tuple[int, ...] = (),
    peers: tuple[str, ...] = PEERS,
    variants: tuple[str, ...] = ("eager", "CUDA graph"),
    groups: int = 7,
    group_seconds: float = 0.05,
    limit_seconds: float = 90.0,
    output: Path | None = None,
) -> None:
    """Times PyTorch's tensor parallelism on the layers of `python -m benchmarks stack`.

    Args:
        devices: GPUs, a process for each.
        shapes: Which layers, as for the stack.
        directions: forward, forward_backward.
        layers: Layers of every stack; default: 8 forward, 4 forward and backward.
        sweep_m: Rows to try each shape with, instead of its own.
        peers: torch, torch_async_tp.
        variants: eager, "CUDA graph", compiled; the fastest counts.
        groups: Timed groups; in each, the peers take turns.
        group_seconds: How long each peer is timed in a group, after half as long untimed.
        limit_seconds: No further case begins after this many seconds.
        output: Where to write the results, as JSON.
    """
    stack = Stack(shapes=shapes, directions=directions, layers=layers, sweep_m=sweep_m)
    try:
        check_names("shapes", shapes, list(SHAPES))
        run = torch_stack(
            stack.cases(),
            devices=devices,
            peers=peers,
            variants=variants,
            groups=groups,
            group_seconds=group_seconds,
            limit_seconds=limit_seconds,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    if output is not None:
        output.write_text(json.dumps(dataclasses.asdict(run), indent=1) + "\n")
    if run.reason is not None:
        sys.exit(run.reason)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.peers")
