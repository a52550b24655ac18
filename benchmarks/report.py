"""A benchmark's report: JSON that grows case by case, and what is read from it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, ops_tables, tables
from benchmarks.measuring import Result
from benchmarks.settings import Settings

Section = Callable[[dict[str, Any]], str]


#: Settings that name a folder.
_PLACES = ("output", "profile")


def without_places(arguments: Sequence[str]) -> list[str]:
    """The command line without the folders that it names."""
    flags = {f"--{name}" for name in _PLACES}
    after_flag = [False, *(argument in flags for argument in arguments)]
    return [
        argument
        for argument, is_value in zip(arguments, after_flag, strict=False)
        if not is_value and argument.split("=")[0] not in flags
    ]


class Report:
    """Cases as they come, written to a folder after each, so that a killed run keeps its own.

    Args:
      benchmark: its name.
      settings: what it was told.
      devices: their kinds, where JAX must not look for them in this process.
      own: its tables, if its cases have no contenders.
    """

    def __init__(
        self,
        benchmark: str,
        settings: Settings,
        devices: Sequence[str] | None = None,
        own: Sequence[Section] | None = None,
    ):
        self.folder = settings.output or default_folder(benchmark)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own = own
        self._started = time.monotonic()
        self._limit = settings.limit_seconds
        # Where the results lie says nothing about them.
        arguments = without_places(sys.argv[1:])
        command = shlex.join([Path(sys.executable).name, "-m", "benchmarks", *arguments])
        self.content: dict[str, Any] = {
            "benchmark": benchmark,
            "environment": environment.describe(command, devices),
            "settings": _plain(dataclasses.asdict(settings) | dict.fromkeys(_PLACES)),
            "cases": [],
        }
        self.say(f"{benchmark}: report in {self.folder}")

    @property
    def seconds(self) -> float:
        """Since the benchmark began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Until no further case may begin."""
        return self._limit - self.seconds

    def out_of_time(self) -> bool:
        """Whether no further case may begin; says so."""
        if self.seconds_left > 0:
            return False
        self.say(f"stopped: limit_seconds={self._limit:g} is over")
        return True

    def say(self, line: str) -> None:
        """A line of progress."""
        now = datetime.datetime.now().strftime("%H:%M:%S")
        print(f"{now} {self.seconds:6.1f} s  {line}", flush=True)

    def add(self, case: dict[str, Any], results: dict[str, Result]) -> None:
        """Adds a case, writes the JSON, says how it went.

        Args:
          case: what it is; "name" names it.
          results: by contender.
        """
        whole = {**case, "contenders": {n: with_times(r) for n, r in results.items()}}
        self.content["cases"].append(_plain(whole))
        said = "; ".join(_sentence(name, r) for name, r in whole["contenders"].items())
        self.say(f"{case['name']}: {said}")
        self.write()

    def add_peer(self, case: str, contender: str, result: Result) -> None:
        """Adds a contender that took no turns with the others to a case that was added before."""
        for added in self.content["cases"]:
            if added["name"] == case:
                added["contenders"][contender] = _plain(with_times(result))
                self.say(f"{case}: {_sentence(contender, added['contenders'][contender])}")
        self.write()

    def write_cases(self, cases: Sequence[dict[str, Any]]) -> None:
        """Writes these in place of the cases there are."""
        self.content["cases"] = _plain(list(cases))
        self.write()

    def write(self) -> None:
        """Writes report.json and report.md; a reader never sees half of one."""
        for name, text in (
            ("report.json", json.dumps(self.content, indent=1, allow_nan=False) + "\n"),
            ("report.md", markdown(self.content, self._own)),
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


def markdown(content: dict[str, Any], own: Sequence[Section] | None = None) -> str:
    """The tables of a report; `own` instead of those that tell of contenders."""
    sections: list[Section] = [tables.title, tables.environment]
    written = [section(content) for section in [*sections, *(own or _of_contenders(content))]]
    return "\n\n".join(section for section in written if section) + "\n"


def _of_contenders(content: dict[str, Any]) -> list[Section]:
    if content["benchmark"] == "ops":
        own: list[Section] = [ops_tables.wins_by_rows, ops_tables.noise, ops_tables.every_op]
    else:
        own = [
            tables.times,
            tables.throughput,
            tables.over_ceiling,
            tables.memory,
            tables.compilation,
            tables.options_tried,
            tables.decisions,
        ]
    return [*own, tables.stand_ins, tables.failures]


def _sentence(name: str, result: dict[str, Any]) -> str:
    if result["failure"] is not None:
        return f"{name}: {result['failure']}"
    if "median" not in result:
        return f"{name} traced in {result['trace_seconds']:.1f} s, compiled in" + (
            f" {result['compile_seconds']:.1f} s"
        )
    same = f" (same program as {result['same_program_as']})" if result["same_program_as"] else ""
    return f"{name} {1e3 * result['median']:.3f} ms{same}"


def default_folder(benchmark: str) -> Path:
    """Where a report goes that is given no place."""
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    return Path(__file__).parent / "reports" / f"{now}-{benchmark}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: infinities and paths as text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)
