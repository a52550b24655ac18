"""From executables to numbers: the options that serve each contender best, then all in turns."""

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
from benchmarks.profiling import Profile, record
from collective_matmul.tuning.timing import measure

#: Groups that decide between sets of options: enough to tell those that differ.
PILOT_GROUPS = 3

Run = Callable[[], Any]


@dataclass
class Result:
    """What one contender did in one case."""

    samples: tuple[float, ...] = ()
    """Seconds per call, one number for each group."""
    options: str = ""
    """The set of options that served it best."""
    tried: dict[str, float] = field(default_factory=dict)
    """Median seconds per call in a short trial of each set of options, where there are several."""
    same_program_as: str | None = None
    """Another contender whose program is the same: its samples are this one's too."""
    temporary_bytes: int | None = None
    """Per device, beyond arguments and results."""
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    decisions: dict[str, int] = field(default_factory=dict)
    """What carries out the ops and why, with how many ops that is true of."""
    profile: Profile | None = None
    failure: str | None = None
    """Why there are no samples."""


Results = dict[str, Result]


@dataclass(frozen=True)
class Timed:
    """How to time.

    Attributes:
      groups: samples for each contender.
      seconds: how long each contender runs in each group.
      again: a contender to time twice, the second time under "NAME again": by what two times of
        one program differ.
      profile: a folder for a profile of each contender.
      watch: whether to look at the GPUs' power and clocks while a contender runs.
    """

    groups: int
    seconds: float
    again: str | None = None
    profile: Path | None = None
    watch: bool = False


class Measured(NamedTuple):
    """What was found in one case."""

    results: Results
    gpus: list[dict[str, str]]
    """The state of every GPU under load, if it was asked for and can be known."""


def measure_case(case: Compiled, timed: Timed) -> Measured:
    """Times the executables, contenders in turns, and frees them and their arrays."""
    runs = _warm_up(case)
    tried = {name: _try_options(choices) for name, choices in runs.items()}
    fastest = {name: min(times, key=times.__getitem__) for name, times in tried.items()}
    chosen = {name: runs[name][executable] for name, executable in fastest.items()}
    again = f"{timed.again} again"
    if timed.again in chosen:
        chosen[again] = chosen[timed.again]
    timings = measure(chosen, groups=timed.groups, seconds_per_group=timed.seconds)
    results = describe(case, list(fastest.values()))
    for name, executable in fastest.items():
        profile = timed.profile and record(chosen[name], timed.profile / name)
        for program in executable.programs:
            result = results[program.contender]
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


def describe(case: Compiled, executables: list[Executable]) -> Results:
    """What is known of the contenders, by these executables, without running anything."""
    results = {name: Result() for name in case.contenders}
    for executable in executables:
        for program in executable.programs:
            results[program.contender] = Result(
                options=program.options,
                same_program_as=(
                    None if program is executable.programs[0] else executable.contender
                ),
                temporary_bytes=executable.compiled.memory_analysis().temp_size_in_bytes,
                trace_seconds=program.seconds,
                compile_seconds=executable.seconds,
                decisions=dict(
                    Counter(f"{d.implementation}: {d.reason} ({d.site})" for d in program.decisions)
                ),
            )
    for name, result in results.items():
        # A set of options that XLA refuses is no failure where another one worked.
        if result.compile_seconds is None:
            result.failure = case.failures.get(name)
    return results


def _warm_up(case: Compiled) -> dict[str, dict[Executable, Run]]:
    """By contender, in order, what runs each of its executables; those that fail are left out."""
    runs: dict[str, dict[Executable, Run]] = {}
    if not case.executables:
        return runs
    made = case.make()
    for executable in sorted(
        case.executables, key=lambda executable: case.contenders.index(executable.contender)
    ):
        with case.noting_failure(executable.contender):
            run = executable.on(made)
            jax.block_until_ready(run())
            runs.setdefault(executable.contender, {})[executable] = run
    return runs


def _watch(run: Run) -> list[dict[str, str]]:
    """The state of the GPUs while they do this."""
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
