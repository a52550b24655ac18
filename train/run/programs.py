"""Programs of a run, which all of its processes compile together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from train.processes.agreement import check_same, together
from train.run.tracing import tracing

_ADVICE = "give all nodes the same tuned tables, the same library and the same environment"


@dataclass(frozen=True)
class CompiledProgram:
    """A program that runs on the devices of all processes.

    It may have kernels that address peers' memory: launch it from the main thread.

    Attributes:
      run: the program, to be called with its arguments.
      lines: what executes its collective matmuls, as lines to print.
    """

    run: jax.stages.Compiled
    lines: list[str]


def compile_together(jitted: Any, *arguments: Any) -> CompiledProgram:
    """Compiles a function of `overlap_jit` for arguments, or their shapes and shardings.

    Every process calls it equally often and in the same order.

    Raises:
      AgreedError: the processes would compile programs that differ.
    """
    # To find out whether they can address each other's memory, processes wait for each other for no
    # more than a minute. One may have read its weights for longer than the others.
    with together():
        pass
    with tracing():
        program = jitted.decided(*arguments)
    kinds = Counter(f"{d.implementation} ({d.reason})" for d in dict.fromkeys(program.decisions))
    peer_kernels = str(program.peer_kernels)
    # Processes whose programs differ would wait for each other for ever.
    check_same("choice of backends", {**dict(sorted(kinds.items())), peer_kernels: 1}, _ADVICE)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines = [f"collective matmuls of different shape: {listed}"]
    if program.peer_kernels.matters:
        lines.append(peer_kernels)
    with together(RuntimeError):  # One of them finds out what differs, or cannot compile.
        return CompiledProgram(program.compile(), lines)
