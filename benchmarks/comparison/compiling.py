"""Compiles programs, many at once, before any array exists and before anything is timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.comparison import operands
from benchmarks.comparison.baseline_xla_options import XlaOptions
from benchmarks.comparison.candidates import COMPILERS, Candidate
from benchmarks.comparison.programs import Made, Program
from benchmarks.internals import Decision
from benchmarks.measuring.turns import one_at_a_time_on_cpus
from collective_matmul import record_decisions

Build = Callable[[Candidate], Program]


@dataclass(frozen=True)
class Traced:
    """A lowered program of a candidate."""

    candidate: Candidate
    program: Program
    lowered: Any
    seconds: float
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program, without its arrays.

    Attributes:
      programs: all that are the same to XLA; it is measured under the name of the first.
      options: the name of its set of XLA options.
      compiled: JAX's executable.
      seconds: what compiling took.
    """

    programs: tuple[Traced, ...]
    options: str
    compiled: Any
    seconds: float

    @property
    def candidate(self) -> str:
        return self.programs[0].candidate.name

    def on(self, made: Made) -> Callable[[], Any]:
        """A function that runs it once, on what was made for it."""
        return one_at_a_time_on_cpus(made.bind(self.compiled, self.programs[0].program.arguments))


@dataclass
class Compiled:
    """A compiled case.

    Attributes:
      candidates: their names, in order.
      executables: in no order.
      failures: by candidate, the last thing that went wrong.
    """

    candidates: tuple[str, ...]
    executables: list[Executable] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    maker: Callable[[], Made] | None = None

    def make(self) -> Made:
        """The arrays that all programs run on."""
        assert self.maker is not None, "not one program could be traced"
        return self.maker()

    @contextlib.contextmanager
    def noting_failure(self, *candidates: Candidate) -> Iterator[None]:
        """Notes what goes wrong with candidates, in JAX or on the device; the others go on."""
        try:
            yield
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0]
            for candidate in candidates:
                self.failures[candidate.name] = f"{type(error).__name__}: {sentence[:300]}"


def compile_cases(
    candidates: Sequence[Candidate], builds: Sequence[Build], threads: int
) -> list[Compiled]:
    """Traces and compiles the programs of all cases.

    Nothing may be timed meanwhile: XLA tries kernels on the devices as it compiles.

    Args:
      candidates: all whose programs to compile.
      builds: for each case, a function that makes the program of a candidate.
      threads: programs compiled at the same time.
    """
    names = tuple(candidate.name for candidate in candidates)
    cases = [Compiled(names) for _ in builds]
    jobs: list[Future[None]] = []
    with ThreadPoolExecutor(threads) as pool:
        for case, build in zip(cases, builds, strict=True):
            # Tracing is Python, and gains nothing from threads; XLA compiles beside it.
            traced: list[Traced] = []
            for candidate in candidates:
                with case.noting_failure(candidate):
                    traced.append(trace(candidate, build(candidate)))
            for same in _same_programs(traced):
                for name, options in same[0].candidate.option_sets.items():
                    jobs.append(pool.submit(_compile, case, same, name, options))
            jobs.append(pool.submit(_compile_maker, case, traced))
    for job in jobs:
        job.result()
    return cases


def trace(candidate: Candidate, program: Program) -> Traced:
    """Traces and lowers a program; records what the library decides meanwhile."""
    arguments = operands.abstract(program.arguments)
    started = time.perf_counter()
    with record_decisions() as decisions:
        jitted = COMPILERS[candidate.compiler](program.fun, donate_argnums=program.donated)
        # The program of a call, as the trainer and the generator run it.
        decided = getattr(jitted, "decided", None)
        lowered = decided(*arguments).lower() if decided else jitted.lower(*arguments)
    seconds = time.perf_counter() - started
    return Traced(candidate, program, lowered, seconds, tuple(decisions))


def _same_programs(traced: Sequence[Traced]) -> list[tuple[Traced, ...]]:
    """Groups of programs that compile to the same executable."""
    groups: dict[tuple[str, ...], tuple[Traced, ...]] = {}
    for program in traced:
        candidate = program.candidate
        key = program.lowered.as_text(), candidate.compiler, *candidate.option_sets
        groups[key] = (*groups.get(key, ()), program)
    return list(groups.values())


def _compile(case: Compiled, programs: tuple[Traced, ...], name: str, options: XlaOptions) -> None:
    with case.noting_failure(*(program.candidate for program in programs)):
        started = time.perf_counter()
        compiled = programs[0].lowered.compile(compiler_options=dict(options) or None)
        seconds = time.perf_counter() - started
        case.executables.append(Executable(programs, name, compiled, seconds))


def _compile_maker(case: Compiled, traced: Sequence[Traced]) -> None:
    if traced:
        own = traced[0].program.make
        case.maker = own or operands.compile_maker([t.program.arguments for t in traced])
