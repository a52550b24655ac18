"""Finds the fastest options of each candidate of a case, then times all candidates in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.comparison.compiling import Compiled, Executable
from benchmarks.comparison.programs import Made
from benchmarks.internals import measure
from benchmarks.measuring.environment import gpu_state
from benchmarks.measuring.profiling import record
from benchmarks.measuring.report import Result
from benchmarks.pytorch import FIRST_STEPS

#: Groups that decide between sets of options.
PILOT_GROUPS = 3

Run = Callable[[], Any]


Results = dict[str, Result]


@dataclass(frozen=True)
class Timed:
    """Settings for timing.

    Attributes:
      groups: samples for each candidate.
      seconds: how long each candidate runs in each group.
      again: a candidate to time twice, the second time under "NAME again": two times of one
        program show the noise.
      profile: a folder for a profile of each candidate.
      watch: whether to record the GPUs' power and clocks while a candidate runs.
    """

    groups: int
    seconds: float
    again: str | None = None
    profile: Path | None = None
    watch: bool = False


def measure_case(case: Compiled, timed: Timed) -> tuple[Results, list[dict[str, str]]]:
    """Times the executables, candidates in turns, and frees them and their arrays.

    Returns:
      The results; and the state of every GPU under load, if it was asked for and can be known.
    """
    made = case.make() if case.executables else None
    warm = warm_up(case, made)
    tried = _try_options(warm)
    executables = {executable: warm[executable] for executable in tried}
    runs = {executable.candidate: run for executable, run in executables.items()}
    again = f"{timed.again} again"
    if timed.again in runs:
        runs[again] = runs[timed.again]
    timings = measure(runs, groups=timed.groups, seconds_per_group=timed.seconds)
    results = describe(case, executables, made)
    for executable, run in executables.items():
        profile = timed.profile and record(run, timed.profile / executable.candidate)
        for program in executable.programs:
            result = results[program.candidate.name]
            result.samples, result.profile = timings[executable.candidate].samples, profile
            result.tried = tried[executable]
    if again in runs:
        results[again] = replace(
            results[str(timed.again)], samples=timings[again].samples, same_program_as=timed.again
        )
    gpus = gpus_at_work(list(runs.values())[-1]) if timed.watch and runs else []
    case.executables.clear()
    return results, gpus


def describe(case: Compiled, executables: Iterable[Executable], made: Made | None) -> Results:
    """Facts from the executables of candidates, and from the steps that they took."""
    refused = "XLA refuses its options"
    results = {name: Result(failure=case.failures.get(name, refused)) for name in case.candidates}
    for executable in executables:
        memory = executable.compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        first = getattr(made, "first_metrics", {}).get(executable.compiled)
        losses = () if first is None else (first["loss"], *getattr(made, "losses", ()))
        for program in executable.programs:
            is_first = program is executable.programs[0]
            decided = (f"{d.implementation}: {d.reason} ({d.site})" for d in program.decisions)
            results[program.candidate.name] = Result(
                options=executable.options,
                same_program_as=None if is_first else executable.candidate,
                temporary_bytes=memory.temp_size_in_bytes,
                peak_bytes=held - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
                trace_seconds=program.seconds,
                compile_seconds=executable.seconds,
                losses=tuple(map(float, losses[:FIRST_STEPS])),
                gradient_norm=None if first is None else float(first["grad_norm"]),
                decisions=dict(Counter(decided)),
            )
    return results


def warm_up(
    case: Compiled,
    made: Made | None,
    note: Callable[[Executable, Any], None] = lambda executable, results: None,
) -> dict[Executable, Run]:
    """A function that runs each executable, in order; those that fail are left out.

    `note` is called with the first results of each.
    """
    runs: dict[Executable, Run] = {}
    for executable in sorted(case.executables, key=lambda e: case.candidates.index(e.candidate)):
        assert made is not None
        with case.noting_failure(*(program.candidate for program in executable.programs)):
            run = executable.on(made)
            note(executable, jax.block_until_ready(run()))
            runs[executable] = run
    return runs


def _try_options(runs: dict[Executable, Run]) -> dict[Executable, dict[str, float]]:
    """The fastest executable of each candidate, and the medians of its sets of options."""
    fastest: dict[Executable, dict[str, float]] = {}
    for candidate in dict.fromkeys(executable.candidate for executable in runs):
        sets = {e.options: e for e in runs if e.candidate == candidate}
        if len(sets) == 1:
            fastest[sets.popitem()[1]] = {}
            continue
        timings = measure({name: runs[e] for name, e in sets.items()}, groups=PILOT_GROUPS)
        medians = {name: timing.median for name, timing in timings.items()}
        fastest[sets[min(medians, key=medians.__getitem__)]] = medians
    return fastest


def gpus_at_work(run: Run) -> list[dict[str, str]]:
    """The state of the GPUs while a candidate runs."""
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(gpu_state)
        while not state.done():
            jax.block_until_ready(run())
    return state.result()
