"""From contenders to numbers: trace, compile, choose the options that serve each best, time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from benchmarks import arrays
from benchmarks.contenders import Contender, Jit
from benchmarks.programs import Program
from collective_matmul.choose import Decision, record_decisions
from collective_matmul.choose.measure import measure

#: Groups that decide between sets of options: enough to tell those that differ.
PILOT_GROUPS = 3


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
    """A compiled program, still without its arrays."""

    traced: Traced
    compiled: Any
    seconds: float

    def on(self, made: arrays.Arrays) -> Callable[[], Any]:
        """What runs it once, on these arrays."""
        arguments = made.fill(self.traced.arguments)

        def run():
            results = self.compiled(*arguments)
            # Simulated devices share few threads: a call queued behind this one could take the
            # thread that this one's collectives wait for.
            return jax.block_until_ready(results) if jax.default_backend() == "cpu" else results

        return run


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


class Case:
    """One case: the program that each contender makes of it, and what becomes of them.

    `prepare` several together, then measure each.

    Args:
      contenders: who takes part.
      build: the program of a contender.

    Attributes:
      results: by contender. One that fails says why there, and costs the others nothing.
    """

    def __init__(self, contenders: Sequence[Contender], build: Callable[[Contender], Program]):
        self.results = {contender.name: Result() for contender in contenders}
        self._contenders, self._build = contenders, build
        self._traced: list[Traced] = []
        self._executables: list[Executable] = []
        self._make_arrays: Callable[[], arrays.Arrays] | None = None

    def trace(self) -> None:
        """Traces the programs of every contender."""
        for contender in self._contenders:
            with self._noting_failure(contender.name):
                program = self._build(contender)
                for options, jit in contender.jits.items():
                    self._traced.append(trace(contender.name, options, jit, program))

    def compilations(self) -> list[Callable[[], None]]:
        """What there is to compile, each to be called once, in any thread."""
        distinct: dict[tuple[str, str], Traced] = {}
        for traced in self._traced:
            same = distinct.setdefault((traced.options, traced.lowered.as_text()), traced)
            if same is not traced:
                self.results[traced.contender].same_program_as = same.contender
        compile_each = [functools.partial(self._compile, traced) for traced in distinct.values()]
        return [self._compile_arrays, *compile_each]

    def _compile(self, traced: Traced) -> None:
        with self._noting_failure(traced.contender):
            started = time.perf_counter()
            compiled = traced.lowered.compile()
            seconds = time.perf_counter() - started
            self._executables.append(Executable(traced, compiled, seconds))

    def _compile_arrays(self) -> None:
        self._make_arrays = arrays.compile_maker([traced.arguments for traced in self._traced])

    def measure(
        self, groups: int, seconds: float, *, again: str | None = None
    ) -> dict[str, Result]:
        """Times the programs, contenders in turns, and returns the results.

        Whatever is on the devices for them is freed.

        Args:
          groups: samples for each contender.
          seconds: how long each contender runs in each group.
          again: a contender to time twice, the second time under "NAME again": what two times of
            one program differ by.
        """
        assert self._make_arrays is not None, "not prepared"
        made = self._make_arrays()
        runs: dict[str, dict[str, Callable[[], Any]]] = {}
        for executable in self._executables:
            name, options = executable.traced.contender, executable.traced.options
            with self._noting_failure(name):
                run = executable.on(made)
                jax.block_until_ready(run())
                runs.setdefault(name, {})[options] = run
        fastest = {name: self._fastest_options(name, choices) for name, choices in runs.items()}
        chosen = {name: runs[name][fastest[name]] for name in runs}
        if again in chosen:
            chosen[f"{again} again"] = chosen[again]
        timings = measure(chosen, groups=groups, seconds_per_group=seconds)
        for name in runs:
            self._describe(name, fastest[name], timings[name].samples)
        if again in runs:
            name = f"{again} again"
            self.results[name] = replace(
                self.results[again], samples=timings[name].samples, same_program_as=again
            )
        self._executables.clear()
        return self.results

    def _fastest_options(self, contender: str, runs: Mapping[str, Callable[[], Any]]) -> str:
        if len(runs) == 1:
            return next(iter(runs))
        timings = measure(runs, groups=PILOT_GROUPS)
        tried = {options: timing.median for options, timing in timings.items()}
        self.results[contender].tried = tried
        return min(tried, key=tried.__getitem__)

    def _describe(self, measured: str, options: str, samples: tuple[float, ...]) -> None:
        """Notes the samples with the contender measured and all whose program is the same."""
        (executable,) = (
            executable
            for executable in self._executables
            if (executable.traced.contender, executable.traced.options) == (measured, options)
        )
        for traced in self._traced:
            result = self.results[traced.contender]
            if traced.options == options and measured in (
                traced.contender,
                result.same_program_as,
            ):
                result.samples, result.options = samples, options
                result.temporary_bytes = executable.compiled.memory_analysis().temp_size_in_bytes
                result.trace_seconds = traced.seconds
                result.compile_seconds = executable.seconds
                result.decisions = _count(traced.decisions)
                # A set of options that XLA refuses is no failure where another one worked.
                result.failure = None

    @contextlib.contextmanager
    def _noting_failure(self, contender: str) -> Iterator[None]:
        """Whatever goes wrong with one contender, in JAX or on the device, the others count."""
        try:
            yield
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0]
            self.results[contender].failure = f"{type(error).__name__}: {sentence[:300]}"


def prepare(cases: Sequence[Case], threads: int) -> None:
    """Traces and compiles all programs of the cases, in threads.

    Nothing may be timed meanwhile: XLA tries kernels on the devices as it compiles.
    """
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(Case.trace, cases))
        compilations = [compilation for case in cases for compilation in case.compilations()]
        list(pool.map(lambda compilation: compilation(), compilations))


def trace(contender: str, options: str, jit: Jit, program: Program) -> Traced:
    """Traces and lowers a program; records what the library decides meanwhile."""
    started = time.perf_counter()
    with record_decisions() as decisions:
        lowered = jit(program.fun).lower(*arrays.abstract(program.arguments))
    seconds = time.perf_counter() - started
    return Traced(contender, options, lowered, program.arguments, seconds, tuple(decisions))


def _count(decisions: Sequence[Decision]) -> dict[str, int]:
    return dict(Counter(f"{d.implementation}: {d.reason} ({d.site})" for d in decisions))
