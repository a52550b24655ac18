"""A benchmark's report: JSON that grows case by case, and the tables made of it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import environment, tables
from benchmarks.measuring.profiling import Profile
from benchmarks.measuring.settings import Settings

Section = Callable[[dict[str, Any]], str]

#: Settings that name a folder, which says nothing about the results.
_FOLDERS = ("output", "profile")


def without_folders(arguments: Sequence[str]) -> list[str]:
    """The command line without the folders that it names."""
    flags = {f"--{name}" for name in _FOLDERS}
    after_flag = [False, *(argument in flags for argument in arguments)]
    return [
        argument
        for argument, is_value in zip(arguments, after_flag, strict=False)
        if not is_value and argument.split("=")[0] not in flags
    ]


@dataclass
class Result:
    """The measurements of one candidate in one case."""

    samples: tuple[float, ...] = ()
    """Seconds per call, one number for each group."""
    options: str = ""
    """The fastest set of XLA options, or way to run PyTorch."""
    tried: dict[str, float] = field(default_factory=dict)
    """Median seconds per call in a short trial of each of them, where there are several."""
    same_program_as: str | None = None
    """Another candidate whose program is the same, and whose samples these are."""
    temporary_bytes: int | None = None
    """Per device, beyond arguments and results."""
    peak_bytes: int | None = None
    """Per device, arguments and results too; for PyTorch, the most that was allocated in a step."""
    losses: tuple[float, ...] = ()
    """Of the first training steps; all candidates of JAX take turns with one state after the first
    step, which each takes from the same parameters."""
    gradient_norm: float | None = None
    """Of the first training step."""
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    decisions: dict[str, int] = field(default_factory=dict)
    """Which backend executes ops and why, with the number of ops."""
    profile: Profile | None = None
    failure: str | None = None
    """Why there are no samples."""


class Report:
    """The cases of a run, written to a folder after each, so that a killed run keeps its cases.

    Args:
      benchmark: its name.
      settings: the settings of the command line.
      sections: its tables.
      devices: their kinds, where JAX must not look for them in this process.
    """

    def __init__(
        self,
        benchmark: str,
        settings: Settings,
        sections: Sequence[Section],
        devices: Sequence[str] | None = None,
    ):
        now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
        self.folder = settings.output or Path(f"{now}-{benchmark}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sections = sections
        self._started = time.monotonic()
        self._limit = settings.limit_seconds
        arguments = without_folders(sys.argv[1:])
        command = shlex.join([Path(sys.executable).name, "-m", "benchmarks", *arguments])
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "environment": environment.describe(command, devices),
            "settings": _plain(dataclasses.asdict(settings) | dict.fromkeys(_FOLDERS)),
            "cases": [],
        }
        self.log(f"{benchmark}: report in {self.folder}")

    @property
    def seconds(self) -> float:
        """Seconds since the benchmark began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Seconds until no further case may begin."""
        return self._limit - self.seconds

    def out_of_time(self) -> bool:
        """Whether no further case may begin; prints so."""
        if self.seconds_left > 0:
            return False
        self.log(f"stopped: limit_seconds={self._limit:g} is over")
        return True

    def log(self, line: str) -> None:
        """Prints a line of progress."""
        now = datetime.datetime.now().strftime("%H:%M:%S")
        print(f"{now} {self.seconds:6.1f} s  {line}", flush=True)

    def add(self, case: dict[str, Any], results: dict[str, Result]) -> None:
        """Adds a case, writes the report, prints the results.

        Args:
          case: its description; "name" names it.
          results: by candidate.
        """
        whole = {**case, "candidates": {n: with_times(r) for n, r in results.items()}}
        self.content["cases"].append(_plain(whole))
        sentences = "; ".join(_sentence(name, r) for name, r in whole["candidates"].items())
        self.log(f"{case['name']}: {sentences}")
        self.write()

    def add_result(self, case: str, candidate: str, result: Result) -> None:
        """Adds a candidate that took no turns with the others to a case that was added before."""
        for added in self.content["cases"]:
            if added["name"] == case:
                added["candidates"][candidate] = _plain(with_times(result))
                self.log(f"{case}: {_sentence(candidate, added['candidates'][candidate])}")
        self.write()

    def write_cases(self, cases: Sequence[dict[str, Any]]) -> None:
        """Replaces all cases and writes the report."""
        self.content["cases"] = _plain(list(cases))
        self.write()

    def write(self) -> None:
        """Writes report.json and report.md; a reader never sees half of one."""
        for name, text in (
            ("report.json", json.dumps(self.content, indent=1, allow_nan=False) + "\n"),
            ("report.md", markdown(self.content, self._sections)),
        ):
            part = self.folder / f"{name}.part"
            part.write_text(text)
            part.replace(self.folder / name)


def with_times(result: Result) -> dict[str, Any]:
    """A result as JSON, with the median, least and most of its samples."""
    content = dataclasses.asdict(result)
    if result.samples:
        content["median"] = statistics.median(result.samples)
        content["low"], content["high"] = min(result.samples), max(result.samples)
    return content


def markdown(content: dict[str, Any], sections: Sequence[Section]) -> str:
    """The machine and the tables of a report."""
    written = [section(content) for section in (tables.title, tables.environment, *sections)]
    return "\n\n".join(section for section in written if section) + "\n"


def _sentence(name: str, result: dict[str, Any]) -> str:
    if result["failure"] is not None:
        return f"{name}: {result['failure']}"
    same = f" (same program as {result['same_program_as']})" if result["same_program_as"] else ""
    return f"{name} {1e3 * result['median']:.3f} ms{same}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: infinities and paths as text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)
