"""The run that all benchmarks share: cases are compiled some at a time, then measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.comparison import candidates
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.compiling import Compiled, compile_cases
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Program
from benchmarks.comparison.timing import Timed, measure_case
from benchmarks.internals import REFERENCE, RecipeName
from benchmarks.measuring import tables
from benchmarks.measuring.report import Report, Section
from benchmarks.measuring.settings import Settings, check, check_names, make_mesh

SECTIONS: tuple[Section, ...] = (
    tables.times,
    tables.training_steps,
    tables.over_compute_only,
    tables.over_pytorch,
    tables.memory,
    tables.profiles,
    tables.decisions,
)


@dataclass(frozen=True, kw_only=True)
class Comparison(Settings):
    """Settings of every comparison of candidates."""

    candidates: tuple[str, ...] = ()
    """What to time; default: everything."""
    try_options: bool = True
    """Whether XLA's own programs are tried with many sets of XLA options; the fastest counts."""
    compile_cases: int = 1
    """Cases compiled at the same time, before they are measured."""
    compile_threads: int = 16
    """Programs compiled at the same time."""
    noise_checks: int = 0
    """Time xla twice in that many cases: two times of one program show the noise."""
    profile: Path | None = None
    """A folder for a profile of every candidate in every case."""


@dataclass(frozen=True, kw_only=True)
class Fp8Comparison(Comparison):
    """Settings of comparisons whose matmuls may have operands in 8 bits."""

    fp8: tuple[RecipeName, ...] = ()
    """Recipes of operands in 8 bits: tensorwise, rowwise, blockwise. Each of the library's own
    candidates takes part once more with each of them, as in auto_fp8_rowwise."""

    def with_fp8(self) -> Self:
        """The settings with these candidates among those that were chosen."""
        return dataclasses.replace(self, candidates=candidates.with_fp8(self.candidates, self.fp8))


class ComparedCase(Protocol):
    """A program that each candidate implements in its own way."""

    @property
    def name(self) -> str: ...

    @property
    def divided_sizes(self) -> Mapping[str, int]:
        """The sizes that devices share evenly, by name."""
        ...

    def build(self, operands: Operands, candidate: Candidate) -> Program: ...

    def describe(self, operands: Operands) -> dict[str, Any]:
        """Its description as JSON; "name" is not needed."""
        ...


def run(
    benchmark: str,
    settings: Comparison,
    cases: Sequence[ComparedCase],
    names: Sequence[str],
    sections: Sequence[Section] = SECTIONS,
) -> Report:
    """Measures the cases; returns the report.

    Args:
      benchmark: its name.
      settings: what to time, and how.
      cases: in the order to measure them in.
      names: the candidates that may take part, in the order of tables.
      sections: the tables, before those of options and failures.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check(settings)
    check_names("candidates", settings.candidates, names)
    mesh = make_mesh(settings)
    check_divisible(cases, mesh.devices.size)
    report = Report(benchmark, settings, [*sections, tables.options_tried, tables.failures])
    chosen = [
        candidates.make(name, mesh, settings.try_options)
        for name in names
        if name in (settings.candidates or names)
    ]
    operands = Operands(mesh, settings.array_dtype)
    for first in range(0, len(cases), settings.compile_cases):
        if report.out_of_time():
            break
        batch = cases[first : first + settings.compile_cases]
        builds = [functools.partial(case.build, operands) for case in batch]
        compiled = compile_cases(chosen, builds, settings.compile_threads)
        report.log(f"compiled {', '.join(case.name for case in batch[:3])}{' …'[: len(batch) > 3]}")
        _measure(batch, compiled, operands, settings, report)
    return report


def _measure(
    cases: Sequence[ComparedCase],
    compiled: Sequence[Compiled],
    operands: Operands,
    settings: Comparison,
    report: Report,
) -> None:
    for case, ready in zip(cases, compiled, strict=True):
        if report.out_of_time():
            return
        checks_noise = len(report.content["cases"]) < settings.noise_checks
        timed = Timed(
            groups=settings.groups,
            seconds=settings.group_seconds,
            again=REFERENCE.name if checks_noise else None,
            profile=settings.profile and settings.profile / case.name.replace(" ", "-"),
            # Asking takes as long as a short case.
            watch=case is cases[0],
        )
        results, gpus = measure_case(ready, timed)
        described = {"name": case.name, "devices": operands.mesh.devices.size}
        described |= case.describe(operands)
        report.add({**described, "gpus": gpus}, results)


def check_divisible(cases: Sequence[ComparedCase], devices: int) -> None:
    """Raises ValueError for a size that so many devices cannot share evenly."""
    for case in cases:
        for name, size in case.divided_sizes.items():
            if size % devices:
                raise ValueError(
                    f"{name}={size} of {case.name!r}: not divisible by {devices} devices;"
                    " choose other sizes or --devices"
                )
