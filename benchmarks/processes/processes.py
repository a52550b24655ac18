"""``python -m benchmarks processes``: decoding with one process for each GPU, and with one for all.

A layer has the matmuls of a Llama block for a few tokens, without attention itself: queries, keys
and values, then the sum over devices of the output; gate and up, then the sum of down. Candidates
are plain JAX and `overlap_jit` with the ops; each runs in processes of its own making.

Legend: B tokens, D devices, K features, F hidden features.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import (
    COLUMNS,
    ROWS,
    CollectiveMatmul,
    Communication,
    PlainJax,
)
from benchmarks.comparison.operands import Operands, compile_maker
from benchmarks.comparison.programs import make_program
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least
from benchmarks.measuring.tables import table
from benchmarks.processes.together import Participant, device_kinds, participate, run_together
from collective_matmul import explain, overlap_jit

CANDIDATES = ("plain", "auto")
#: K, columns of queries, keys and values together, and F, of Llama 3 8B; smaller ones for CPUs.
WIDTHS = {"gpu": (4096, 6144, 14336), "cpu": (64, 96, 128)}

Weights = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Processes(Settings):
    """Times of a token's matmuls with one process for each device, beside one for all of them."""

    batches: tuple[int, ...] = (1, 8, 64, 512)
    """Numbers of tokens."""
    layers: int = 8
    """Layers, one after the other, with weights of their own."""
    calls: int = 20
    """Calls of a group, the same number in each process."""


def run(settings: Processes) -> Report:
    """Runs the benchmark; writes the report after each number of processes.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "layers", "calls")
    devices = settings.devices or 2
    report = Report("processes", settings, [rows], device_kinds(settings.platform, devices))
    found: list[dict[str, Any]] = []
    for processes in dict.fromkeys((1, devices)):
        if not report.out_of_time():
            found += run_together("benchmarks.processes.processes", settings, processes, devices)
            report.write_cases(found)
            report.log(f"{processes} processes: measured")
    print(rows(report.content))
    return report


def rows(content: dict[str, Any]) -> str:
    """Microseconds of a layer, and how much faster `auto` is than plain JAX."""
    header = ["processes", "tokens", "plain JAX", "auto", "plain / auto", "taken", "error"]
    lines = table(header, map(_row, content["cases"]))
    return f"Microseconds of a layer, medians of groups:\n\n{lines}"


def _row(case: dict[str, Any]) -> list[str]:
    plain, auto = (1e6 * statistics.median(case["times"][name]) for name in CANDIDATES)
    times = f"{plain:.1f}", f"{auto:.1f}", f"{plain / auto:.2f}"
    counts = str(case["processes"]), str(case["batch"])
    return [*counts, *times, ", ".join(case["taken"]), f"{case['error']:.1e}"]


def _work(settings: Processes, participant: Participant) -> None:
    """Measures all cases."""
    operands = Operands(participant.join(), np.dtype(settings.array_dtype))
    k, qkv, f = WIDTHS[settings.platform]
    weights = [
        {
            "qkv": operands.weight(COLUMNS, k, qkv, layer),
            "out": operands.weight(ROWS, k, k, layer),
            "gate_up": operands.weight(COLUMNS, k, 2 * f, layer),
            "down": operands.weight(ROWS, f, k, layer),
        }
        for layer in range(settings.layers)
    ]
    inputs = {batch: operands.activations(P(), batch, k) for batch in settings.batches}
    made = compile_maker([weights, inputs])()
    for batch, x in inputs.items():
        plain, op = (
            make_program(communication, _stack(communication), (x, weights), P()).fun
            for communication in (PlainJax(), CollectiveMatmul(None))
        )
        programs: dict[str, Callable] = {"plain": jax.jit(plain), "auto": overlap_jit(op)}
        arguments = made.fill((x, weights))
        results = {name: jax.block_until_ready(f(*arguments)) for name, f in programs.items()}
        expected, auto = (np.asarray(y.astype(jnp.float32)) for y in results.values())
        case = {
            "name": f"{participant.processes} processes, {batch} tokens",
            "processes": participant.processes,
            "batch": batch,
            "times": _times(settings, programs, arguments),
            "taken": sorted({d.implementation for d in explain(op)(*arguments).decisions}),
            "error": float(np.max(abs(auto - expected)) / np.max(abs(expected))),
        }
        participant.tell(case)
        if participant.number == 0:
            # At once, as a later case may fail.
            print(f"{case['name']}: {' '.join(_row(case))}", file=sys.stderr, flush=True)


def _times(
    settings: Processes, programs: dict[str, Callable], arguments: Any
) -> dict[str, list[float]]:
    """Seconds of a layer in each group. All processes make the same calls in the same order."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(settings.groups):
        for name, program in programs.items():
            jax.block_until_ready(program(*arguments))
            began = time.perf_counter()
            for _ in range(settings.calls):
                result = program(*arguments)
            jax.block_until_ready(result)
            seconds = time.perf_counter() - began
            times[name].append(seconds / settings.calls / settings.layers)
    return times


def _stack(communication: Communication) -> Callable[[jax.Array, list[Weights]], jax.Array]:
    """``f(x [B, K], weights) -> [B, K]``."""
    multiply_and_sum = communication.matmul_all_reduce

    def layer(x: jax.Array, w: Weights) -> jax.Array:
        queries = (_norm(x) @ w["qkv"])[:, : w["out"].shape[0]]
        x += multiply_and_sum(queries, w["out"])
        gate, up = jnp.split(_norm(x) @ w["gate_up"], 2, axis=1)
        return x + multiply_and_sum(jax.nn.silu(gate) * up, w["down"])

    # Not a scan, which would copy the weights of each layer.
    return lambda x, weights: functools.reduce(layer, weights, x)


def _norm(x: jax.Array) -> jax.Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True)
    return (x * lax.rsqrt(squares + 1e-5)).astype(x.dtype)


if __name__ == "__main__":
    participate(Processes, _work)
