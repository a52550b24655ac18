"""Benchmarks whose programs take turns: case after case, with a table of medians and quartiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.internals import measure
from benchmarks.measuring import environment
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings

Case = TypeVar("Case")


def measure_cases(
    benchmark: str,
    settings: Settings,
    cases: Iterable[Case],
    measured: Callable[[Case], dict[str, Any]],
    rows: Callable[[dict[str, Any]], str],
) -> Report:
    """Measures cases, and writes the report after each; prints the table at last.

    Args:
      benchmark: its name.
      settings: its settings.
      cases: in the order to measure them in.
      measured: describes a measured case: "name"; "times", samples in seconds by candidate; and
        what else the table needs.
      rows: the table.
    """
    report = Report(benchmark, settings, sections=[rows])
    found: list[dict[str, Any]] = []
    for case in cases:
        if report.out_of_time():
            break
        found.append({**measured(case), "gpus": environment.gpu_state()})
        report.write_cases(found)
        medians = (f"{name} {1e3 * np.median(t):.3f} ms" for name, t in found[-1]["times"].items())
        report.log(f"{found[-1]['name']}: {', '.join(medians)}")
    print(rows(report.content))
    return report


def take_turns(programs: Mapping[str, Callable], settings: Settings) -> dict[str, list[float]]:
    """The samples of programs in seconds, one for each group."""
    timings = measure(programs, groups=settings.groups, seconds_per_group=settings.group_seconds)
    return {name: list(timing.samples) for name, timing in timings.items()}


@dataclass(frozen=True)
class LayerProgram:
    """A program of a layer.

    Attributes:
      fun: a function of the arguments of all programs.
      options: XLA's, for GPUs.
      compared: what of its results must be that of the first program; None: nothing.
    """

    fun: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    compared: Callable[[Any], Any] | None = lambda results: results


def time_layers(
    programs: Mapping[str, LayerProgram], arguments: Sequence[Any], settings: Settings
) -> dict[str, Any]:
    """Compiles and runs each program, then times all that run, in turns.

    Returns:
      "times" in seconds, temporary "GiB", "largest difference to the first", and why programs
      "failed", each by program.
    """
    runs: dict[str, Callable] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    expected = None
    for name, program in programs.items():
        options = program.options if settings.platform == "gpu" else {}
        try:
            lowered = jax.jit(program.fun).lower(*arguments)
            compiled = lowered.compile(compiler_options=options)
            results = jax.block_until_ready(compiled(*arguments))
        except Exception as error:  # The others are still worth their time.
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if program.compared is not None:
            results = program.compared(results)
            expected = results if expected is None else expected
            errors[name] = max(jax.tree.leaves(jax.tree.map(_difference, results, expected)))
        del results
        statistics: Any = compiled.memory_analysis()
        memory[name] = statistics.temp_size_in_bytes / 2**30
        runs[name] = one_at_a_time_on_cpus(functools.partial(compiled, *arguments))
    del expected
    return {
        "times": take_turns(runs, settings),
        "GiB": memory,
        "largest difference to the first": errors,
        "failed": failed,
    }


def one_at_a_time_on_cpus(run: Callable[[], Any]) -> Callable[[], Any]:
    """A function that waits for its results where devices are simulated.

    They share few threads: a call queued after this one could take the thread that this one's
    collectives wait for.
    """
    if jax.default_backend() != "cpu":
        return run
    return lambda: jax.block_until_ready(run())


def _difference(result: jax.Array, expected: jax.Array) -> float:
    """The largest difference, relative to the largest number; infinite for NaN."""
    wide = result.astype(jnp.float32), expected.astype(jnp.float32)
    difference = float(jnp.abs(wide[0] - wide[1]).max() / jnp.abs(wide[1]).max())
    return difference if math.isfinite(difference) else math.inf


def with_quartiles(values: Sequence[float] | np.ndarray, form: str, scale: float = 1.0) -> str:
    """The median, and in parentheses the quartiles."""
    low, middle, high = scale * np.percentile(values, (25, 50, 75))
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"
