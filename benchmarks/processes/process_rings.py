"""``python -m benchmarks process_rings``: layers between two processes, each with one GPU.

Layers of `benchmarks.step.stack`, of which every candidate is timed in turns: the computation
alone; plain JAX; a ring of two devices written out, in plain JAX; and the library. All rings have
NCCL's symmetric buffers, but for "ring_plain_buffers". "fused" and "one_shot" are kernels that
address the other process's memory, and "auto" is what the library chooses by itself.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.comparison.candidates import COMPILERS, Candidate
from benchmarks.comparison.communication import AXIS, CollectiveMatmul, NoCommunication, PlainJax
from benchmarks.comparison.operands import Operands, abstract, compile_maker
from benchmarks.comparison.programs import Direction
from benchmarks.internals import COMPUTE_ONLY
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names
from benchmarks.measuring.tables import table
from benchmarks.measuring.turns import one_at_a_time_on_cpus, take_turns
from benchmarks.processes.together import Participant, device_kinds, participate, run_together
from benchmarks.step.stack import SHAPES, StackCase
from collective_matmul import explain

PROCESSES = 2
_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
_UNMERGED = {"xla_gpu_dot_merger_threshold_mb": "0"}
_WITH_PEER_KERNELS = "overlap_jit(peer_kernels=True)"


@dataclass(frozen=True, kw_only=True)
class ProcessRings(Settings):
    """Times of layers between two processes of one device, beside rings in plain JAX."""

    rows: tuple[int, ...] = (8192, 2048)
    """Numbers of rows."""
    shape: str = "8B"
    """Which layers: those of `stack`."""
    direction: Direction = "forward"
    """Whether gradients are computed too."""
    layers: int = 4
    """Layers of every stack."""
    candidates: tuple[str, ...] = ()
    """Which candidates, besides the computation alone; default: all."""
    separate_autotuning: bool = False
    """Each process tries matmuls by itself; XLA may compile programs that do not fit together."""


class Ring(PlainJax):
    """Two devices' ring of permutes, forward: the products of a gather are joined at last."""

    def others(self, x):
        """Returns the other device's array."""
        return lax.ppermute(x, AXIS, [(0, 1), (1, 0)])

    def all_gather_matmul(self, rows, ws):
        other = self.others(rows)
        own = tuple(rows @ w for w in ws)
        own, rows, other = lax.optimization_barrier((own, rows, other))
        is_second = lax.axis_index(AXIS) == 1
        pairs = zip(own, (other @ w for w in ws), strict=True)
        return tuple(
            lax.concatenate([jnp.where(is_second, b, a), jnp.where(is_second, a, b)], 0)
            for a, b in pairs
        )

    def matmul_reduce_scatter(self, x, w):
        m, me = x.shape[0] // 2, lax.axis_index(AXIS)
        away = lax.dynamic_slice_in_dim(x, (1 - me) * m, m) @ w
        away, x = lax.optimization_barrier((away, x))
        arrived = self.others(away)
        return lax.dynamic_slice_in_dim(x, me * m, m) @ w + arrived


#: The candidates, and the XLA options of each.
CANDIDATES: list[tuple[Candidate, dict[str, Any]]] = [
    (Candidate(COMPUTE_ONLY, NoCommunication(), "jit"), {}),
    (Candidate("plain", PlainJax(), "jit"), {}),
    (Candidate("plain_symmetric_buffers", PlainJax(), "jit"), _SYMMETRIC),
    (Candidate("ring", Ring(), "jit"), _UNMERGED | _SYMMETRIC),
    (Candidate("ring_plain_buffers", Ring(), "jit"), _UNMERGED),
    (Candidate("library_ring", CollectiveMatmul("ring"), "overlap_jit"), _SYMMETRIC),
    (Candidate("one_shot", CollectiveMatmul("one_shot"), _WITH_PEER_KERNELS), {}),
    (Candidate("fused", CollectiveMatmul("fused"), _WITH_PEER_KERNELS), {}),
    (Candidate("auto", CollectiveMatmul(None), "overlap_jit"), {}),
]

NAMES = tuple(candidate.name for candidate, _ in CANDIDATES)


def run(settings: ProcessRings) -> Report:
    """Runs the benchmark.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "layers")
    check_names("shape", (settings.shape,), list(SHAPES))
    check_names("candidates", settings.candidates, NAMES)
    kinds = device_kinds(settings.platform, PROCESSES)
    variables = {}
    if settings.separate_autotuning:
        flags = os.environ.get("XLA_FLAGS", "")
        variables["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false"
    report = Report("process_rings", settings, [ratios], kinds)
    module = "benchmarks.processes.process_rings"
    report.write_cases(run_together(module, settings, PROCESSES, PROCESSES, variables))
    print(ratios(report.content))
    return report


def ratios(content: dict[str, Any]) -> str:
    """The time of each candidate over that of the computation alone, and this in milliseconds."""
    cases = content["cases"]
    medians = {
        case["name"]: {name: statistics.median(times) for name, times in case["times"].items()}
        for case in cases
    }

    def ratio(name: str, times: dict[str, float]) -> str:
        return f"{times[name] / times[COMPUTE_ONLY]:.3f}" if name in times else "–"

    timed = [name for name in NAMES if any(name in times for times in medians.values())]
    lines = [[name, *(ratio(name, m) for m in medians.values())] for name in timed]
    alone = [f"{1e3 * times[COMPUTE_ONLY]:.3f}" for times in medians.values()]
    lines += [[f"ms of a layer, {COMPUTE_ONLY}", *alone]]
    lines += [["auto takes", *(", ".join(case.get("taken", ())) for case in cases)]]
    why = [
        f"{name} at {case['name']}: {r}"
        for case in cases
        for name, r in case.get("failed", {}).items()
    ]
    shown = table(["", *medians], lines)
    return "\n\n".join([f"Medians over those of the computation alone:\n\n{shown}", *why])


def _work(settings: ProcessRings, participant: Participant) -> None:
    """Measures all cases."""

    def show(text: str) -> None:
        # At once, as a later candidate may fail.
        if participant.number == 0:
            print(text, file=sys.stderr, flush=True)

    operands = Operands(participant.join(), np.dtype(settings.array_dtype))
    names = (COMPUTE_ONLY, *(settings.candidates or NAMES))
    for rows in settings.rows:
        shape = dataclasses.replace(SHAPES[settings.shape], rows=rows)
        case = StackCase(shape, settings.direction, settings.layers)
        chosen = [(each, options) for each, options in CANDIDATES if each.name in names]
        programs = {each.name: case.build(operands, each) for each, _ in chosen}
        made = compile_maker([program.arguments for program in programs.values()])()
        runs, failed, taken = {}, {}, set()
        for each, options in chosen:
            fun, arguments, *_ = programs[each.name]
            # Not lowered first: `overlap_jit` allows peer kernels by itself in calls only.
            run = made.bind(COMPILERS[each.compiler](fun, compiler_options=options), arguments)
            began = time.perf_counter()
            try:
                jax.block_until_ready(run())
            except ValueError as error:
                failed[each.name] = str(error)
                continue
            show(f"M {rows}: {each.name} compiled and run in {time.perf_counter() - began:.1f} s")
            runs[each.name] = one_at_a_time_on_cpus(run)
            if each.name == "auto":
                explained = explain(fun)(*abstract(arguments))
                taken = {decision.implementation for decision in explained.decisions}
        times = {
            name: [seconds / settings.layers for seconds in samples]
            for name, samples in take_turns(runs, settings).items()
        }
        measured = {"name": f"M {rows}", "times": times, "failed": failed, "taken": sorted(taken)}
        participant.tell(measured)
        show(ratios({"cases": [measured]}))


if __name__ == "__main__":
    participate(ProcessRings, _work)
