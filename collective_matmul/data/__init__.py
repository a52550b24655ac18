"""Measured data of each kind of device: one schema and one loader.

``data/<device>/<measures>.jsonl`` holds JSON lines. The first line describes the file. Each further
line is one problem with the measured times in microseconds::

    {"format": 2, "measures": "backends", "device_kind": "NVIDIA H200", "runs": [{"date": ...}]}
    {"problem": {"op": "all_gather_matmul", ...}, "run": 0, "microseconds": {"xla": 291.0, ...}}

====================  ========================  ============================================
file                  problem                   times of
====================  ========================  ============================================
backends              a site of an op           every backend, and "compute_only"
fused_configs         a call of a fused kernel  the fastest configuration, which is ``config``
matmul_tilings        the matmul of a chunk     "kernel" with the tiling ``config``, and "xla"
grouped_matmuls       a grouped matmul          backends, "mosaic" with the tiling ``config``
====================  ========================  ============================================

The readers of a file interpret its problems and configurations; this module does not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

FORMAT = 2
#: Names of format 1, and today's names.
_RENAMED = {"bulk": "xla", "ceiling": "compute_only", "rider": "co_gathered"}

#: What readers of a file raise for content that they do not expect: values of other types, numbers
#: that no float holds, nesting without end.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


@dataclass(frozen=True, order=True)
class Run:
    """One run of a benchmark or of `tune`.

    Attributes:
      date: day of the run, as 2026-11-21.
      jax: version of jax.
      devices: number, kind and clocks of the devices.
    """

    date: str
    jax: str
    devices: str


@dataclass(frozen=True)
class Record:
    """One line of a file: a problem and its measured times.

    Attributes:
      problem: the problem, as JSON values.
      microseconds: times by the name of what was timed.
      config: the timed configuration, as JSON values; None if there is nothing to configure.
      run: the run that measured it; None if that was not recorded.
    """

    problem: Mapping[str, Any]
    microseconds: Mapping[str, float]
    config: Mapping[str, Any] | None = None
    run: Run | None = None


@dataclass(frozen=True)
class MeasuredData:
    """The content of one file."""

    measures: str
    device_kind: str
    records: Sequence[Record] = field(repr=False)

    @classmethod
    def from_text(cls, text: str) -> MeasuredData:
        """Parses the text of a file, of this format or an older one.

        Raises:
          ValueError: if the text has another format, whatever it holds.
        """
        try:
            head, *lines = map(json.loads, text.splitlines())
            if head["format"] == 1:
                head, lines = _upgraded(head, lines)
            if head["format"] != FORMAT:
                raise ValueError(f"its format is {head['format']!r}, expected {FORMAT}")
            for name in ("measures", "device_kind"):
                if not isinstance(head[name], str):
                    raise TypeError(f"{name!r} is {head[name]!r}, expected text")
            runs = [_run(run) for run in head["runs"]]
            records = [_record(line, runs) for line in lines]
            return cls(head["measures"], head["device_kind"], records)
        except UNREADABLE as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def updated(self, records: Iterable[Record]) -> MeasuredData:
        """The data with further records. If several are of one problem, the last counts."""
        newest = {json.dumps(dict(record.problem)): record for record in (*self.records, *records)}
        return replace(self, records=list(newest.values()))

    def to_text(self) -> str:
        """The text of the file, with the records in their order."""
        runs = sorted({record.run for record in self.records if record.run is not None})
        head = {
            "format": FORMAT,
            "measures": self.measures,
            "device_kind": self.device_kind,
            "runs": [asdict(run) for run in runs],
        }
        lines = (_line(record, runs) for record in self.records)
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in (head, *lines))


def folder_name(device_kind: str) -> str:
    """`"NVIDIA H200"` -> `"h200"`."""
    short = device_kind.lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-")


def shipped(device_kind: str, measures: str) -> MeasuredData | None:
    """The file that ships with the library, or None if it has none for this kind of device."""
    folder = resources.files(__name__).joinpath(folder_name(device_kind))
    file = folder.joinpath(f"{measures}.jsonl")
    return MeasuredData.from_text(file.read_text(encoding="utf-8")) if file.is_file() else None


def _run(fields: Mapping[str, Any]) -> Run:
    if not all(isinstance(value, str) for value in fields.values()):
        raise TypeError(f"a run of {dict(fields)}, expected text")
    return Run(**fields)


def _record(line: Mapping[str, Any], runs: Sequence[Run]) -> Record:
    run = runs[line["run"]] if "run" in line else None
    microseconds = {name: float(value) for name, value in line["microseconds"].items()}
    if not all(0 < value < math.inf for value in microseconds.values()):
        raise ValueError(f"times that are not above zero, or not finite: {microseconds}")
    return Record(line["problem"], microseconds, line.get("config"), run)


def _line(record: Record, runs: Sequence[Run]) -> dict[str, Any]:
    line: dict[str, Any] = {"problem": dict(record.problem)}
    if record.config is not None:
        line["config"] = dict(record.config)
    if record.run is not None:
        line["run"] = runs.index(record.run)
    rounded = {name: _rounded(value) for name, value in record.microseconds.items()}
    return line | {"microseconds": rounded}


def _upgraded(head: dict[str, Any], lines: Iterable[dict[str, Any]]) -> tuple[dict, list[dict]]:
    """Converts a table of backends of format 1, where a line holds the fields of the problem."""
    upgraded = []
    for line in lines:
        problem = {k: v for k, v in line.items() if k not in ("run", "microseconds")}
        upgraded.append(
            {
                "problem": {_RENAMED.get(name, name): value for name, value in problem.items()},
                "run": line["run"],
                "microseconds": {_RENAMED.get(k, k): v for k, v in line["microseconds"].items()},
            }
        )
    return {**head, "format": FORMAT, "measures": "backends"}, upgraded


def _rounded(microseconds: float) -> float:
    """Rounds to four digits: a measurement repeats to fewer."""
    return float(f"{microseconds:.4g}")
