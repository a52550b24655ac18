"""Times executables: finds the best options of each candidate, then times all in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.compiling import Compiled, Executable
from benchmarks.environment import gpu_state
from benchmarks.internals import measure
from benchmarks.profiling import Profile, record

#: Groups that decide between sets of options: enough to distinguish those that differ.
PILOT_GROUPS = 3

Run = Callable[[], Any]


@dataclass
class Result:
    """The measurements of one candidate in one case."""

    samples: tuple[float, ...] = ()
    """Seconds per call, one number for each group."""
    options: str = ""
    """The fastest set of options."""
    tried: dict[str, float] = field(default_factory=dict)
    """Median seconds per call in a short trial of each set of options, where there are several."""
    same_program_as: str | None = None
    """Another candidate whose program is the same, and whose samples these are."""
    temporary_bytes: int | None = None
    """Per device, beyond arguments and results."""
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    decisions: dict[str, int] = field(default_factory=dict)
    """Which backend executes ops and why, with the number of ops."""
    profile: Profile | None = None
    failure: str | None = None
    """Why there are no samples."""


Results = dict[str, Result]


@dataclass(frozen=True)
class Timed:
    """How to time.

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


class Measured(NamedTuple):
    """The measurements of one case."""

    results: Results
    gpus: list[dict[str, str]]
    """The state of every GPU under load, if it was asked for and can be known."""


def measure_case(case: Compiled, timed: Timed) -> Measured:
    """Times the executables, candidates in turns, and frees them and their arrays."""
    runs = _warm_up(case)
    tried = {name: _try_options(choices) for name, choices in runs.items()}
    fastest = {name: min(times, key=times.__getitem__) for name, times in tried.items()}
    chosen = {name: runs[name][executable] for name, executable in fastest.items()}
    again = f"{timed.again} again"
    if timed.again in chosen:
        chosen[again] = chosen[timed.again]
    timings = measure(chosen, groups=timed.groups, seconds_per_group=timed.seconds)
    results = _describe(case, list(fastest.values()))
    for name, executable in fastest.items():
        profile = timed.profile and record(chosen[name], timed.profile / name)
        for program in executable.programs:
            result = results[program.candidate]
            result.samples, result.profile = timings[name].samples, profile
            if len(tried[name]) > 1:
                result.tried = {e.options: seconds for e, seconds in tried[name].items()}
    if again in chosen:
        results[again] = replace(
            results[str(timed.again)],
            samples=timings[again].samples,
            same_program_as=timed.again,
        )
    gpus = _watch(list(chosen.values())[-1]) if timed.watch and chosen else []
    case.executables.clear()
    return Measured(results, gpus)


def _describe(case: Compiled, executables: list[Executable]) -> Results:
    """What these executables say about their candidates, before anything runs."""
    results = {name: Result() for name in case.candidates}
    for executable in executables:
        for program in executable.programs:
            results[program.candidate] = Result(
                options=program.options,
                same_program_as=(
                    None if program is executable.programs[0] else executable.candidate
                ),
                temporary_bytes=executable.compiled.memory_analysis().temp_size_in_bytes,
                trace_seconds=program.seconds,
                compile_seconds=executable.seconds,
                decisions=dict(
                    Counter(f"{d.implementation}: {d.reason} ({d.site})" for d in program.decisions)
                ),
            )
    for name, result in results.items():
        # A set of options that XLA refuses is not a failure where another one worked.
        if result.compile_seconds is None:
            result.failure = case.failures.get(name)
    return results


def _warm_up(case: Compiled) -> dict[str, dict[Executable, Run]]:
    """A function that runs each executable, by candidate in order; those that fail are left out."""
    runs: dict[str, dict[Executable, Run]] = {}
    if not case.executables:
        return runs
    made = case.make()
    for executable in sorted(
        case.executables, key=lambda executable: case.candidates.index(executable.candidate)
    ):
        with case.noting_failure(executable.candidate):
            run = executable.on(made)
            jax.block_until_ready(run())
            runs.setdefault(executable.candidate, {})[executable] = run
    return runs


def _watch(run: Run) -> list[dict[str, str]]:
    """The state of the GPUs while a candidate runs."""
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(gpu_state)
        while not state.done():
            jax.block_until_ready(run())
    return state.result()


def _try_options(choices: Mapping[Executable, Run]) -> dict[Executable, float]:
    """Median seconds per call of each in a short trial, if there is a choice."""
    if len(choices) == 1:
        return dict.fromkeys(choices, 0.0)
    by_options = {executable.options: executable for executable in choices}
    timings = measure(
        {options: choices[executable] for options, executable in by_options.items()},
        groups=PILOT_GROUPS,
    )
    return {by_options[options]: timing.median for options, timing in timings.items()}
