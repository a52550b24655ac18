"""From contenders to numbers: trace, compile, choose the options that serve each best, time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from benchmarks.contenders import Contender, Jit
from benchmarks.timing import measure
from collective_matmul.choose import Decision, record_decisions

#: Groups that decide between sets of options: enough to tell those that differ.
PILOT_GROUPS = 3


class Program(NamedTuple):
    """A function of device arrays, and the arrays."""

    fun: Callable
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A program as XLA gets it, under a contender's name and one of its sets of options."""

    contender: str
    options: str
    lowered: Any
    arguments: tuple[Any, ...]
    seconds: float
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Executable:
    """A compiled program on its arrays."""

    traced: Traced
    run: Callable[[], Any]
    compile_seconds: float
    temporary_bytes: int


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
    failure: str | None = None
    """Why there are no samples."""


def measure_case(
    contenders: Sequence[Contender],
    build: Callable[[Contender], Program],
    *,
    groups: int,
    threads: int,
) -> dict[str, Result]:
    """Times every contender's program; one that fails says why and costs the others nothing.

    Args:
      contenders: who takes part.
      build: the program of a contender.
      groups: timed groups; in each, contenders take turns.
      threads: programs compiled at the same time.
    """
    results = {contender.name: Result() for contender in contenders}
    traced = [
        program
        for contender in contenders
        for program in _attempt(results[contender.name], _trace, contender, build) or ()
    ]
    distinct = _mark_same_programs(traced, results)
    with ThreadPoolExecutor(threads) as pool:
        # Nothing may be timed while something compiles: XLA tries kernels on the same GPUs.
        compiled = list(
            pool.map(
                lambda program: _attempt(results[program.contender], _compile, program), distinct
            )
        )
    executables = [executable for executable in compiled if executable is not None]
    executables = [e for e in executables if _attempt(results[e.traced.contender], _warm_up, e)]
    fastest = _fastest_options(executables, results)
    timings = measure({name: e.run for name, e in fastest.items()}, groups=groups)
    for program in traced:
        result = results[program.contender]
        measured = result.same_program_as or program.contender
        if measured in fastest and fastest[measured].traced.options == program.options:
            _describe(result, fastest[measured], program.decisions)
            result.samples = timings[measured].samples
    return results


def _attempt(result: Result, step: Callable, *arguments: Any) -> Any:
    """The step's value, or None after noting why there is none.

    Whatever goes wrong with one contender, in JAX, XLA or on the device, the others still count.
    """
    try:
        return step(*arguments)
    except Exception as error:
        result.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        return None


def _trace(contender: Contender, build: Callable[[Contender], Program]) -> list[Traced]:
    program = build(contender)
    return [trace(contender.name, options, jit, program) for options, jit in contender.jits.items()]


def trace(contender: str, options: str, jit: Jit, program: Program) -> Traced:
    """Traces and lowers a program; records what the library decides meanwhile."""
    started = time.perf_counter()
    with record_decisions() as decisions:
        lowered = jit(program.fun).lower(*program.arguments)
    seconds = time.perf_counter() - started
    return Traced(contender, options, lowered, program.arguments, seconds, tuple(decisions))


def _mark_same_programs(traced: Sequence[Traced], results: dict[str, Result]) -> list[Traced]:
    """One of each set of programs that are the same to XLA; the others' results name it."""
    first: dict[tuple[str, str], Traced] = {}
    for program in traced:
        same = first.setdefault((program.options, program.lowered.as_text()), program)
        if same is not program:
            results[program.contender].same_program_as = same.contender
    return list(first.values())


def _compile(traced: Traced) -> Executable:
    started = time.perf_counter()
    compiled = traced.lowered.compile()
    seconds = time.perf_counter() - started

    def run():
        results = compiled(*traced.arguments)
        # Simulated devices share few threads: a call queued behind this one could take the thread
        # that this one's collectives wait for.
        return jax.block_until_ready(results) if jax.default_backend() == "cpu" else results

    return Executable(traced, run, seconds, compiled.memory_analysis().temp_size_in_bytes)


def _warm_up(executable: Executable) -> bool:
    jax.block_until_ready(executable.run())
    return True


def _fastest_options(
    executables: Sequence[Executable], results: dict[str, Result]
) -> dict[str, Executable]:
    """By contender, its executable that is fastest in a short trial."""
    by_contender: dict[str, list[Executable]] = {}
    for executable in executables:
        by_contender.setdefault(executable.traced.contender, []).append(executable)
    fastest = {}
    for name, candidates in by_contender.items():
        if len(candidates) > 1:
            runs = {e.traced.options: e.run for e in candidates}
            timings = measure(runs, groups=PILOT_GROUPS)
            tried = {options: timing.median for options, timing in timings.items()}
            results[name].tried = tried
            candidates = sorted(candidates, key=lambda e: tried[e.traced.options])
        fastest[name] = candidates[0]
    return fastest


def _describe(result: Result, executable: Executable, decisions: Sequence[Decision]) -> None:
    result.options = executable.traced.options
    result.temporary_bytes = executable.temporary_bytes
    result.trace_seconds = executable.traced.seconds
    result.compile_seconds = executable.compile_seconds
    result.decisions = dict(
        Counter(f"{d.implementation}: {d.reason} ({d.site})" for d in decisions)
    )
    # A set of options that XLA refuses is no failure where another one worked.
    result.failure = None
