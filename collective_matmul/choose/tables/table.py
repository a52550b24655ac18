"""A table of measured seconds, and its file.

A file holds JSON lines. The first tells the format, the kind of device and the runs that measured;
each further line is one site with the microseconds of every implementation::

    {"format": 1, "device_kind": "NVIDIA H200", "runs": [{"date": "2026-11-21", ...}]}
    {"op": "all_gather_matmul", "devices": 4, "dtype": "bfloat16",
     "operands": [[2048, 4096, 3584]], "run": 0, "microseconds": {"bulk": 291.0, ...}}

Operands are local [M, K, N], an x [M, K] and a w [K, N]; leading dimensions are joined in M.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from collective_matmul.choose.site import Site

FORMAT = 1

#: The name, among those of implementations, of the matmuls alone with nothing communicated.
CEILING = "ceiling"


@dataclass(frozen=True, order=True)
class Run:
    """What measured an entry.

    Attributes:
      date: its day, as 2026-11-21.
      jax: the version of jax.
      devices: what the devices were and how they were clocked.
    """

    date: str
    jax: str
    devices: str


@dataclass(frozen=True)
class Entry:
    """Median seconds of one site by implementation, bulk among them, and of the ceiling.

    Where a site has a weight gradient, its matmul is included.
    """

    seconds: Mapping[str, float]
    run: Run


@dataclass
class Table:
    """Entries of one kind of device by `Site.flat`, and the file they are in, if any."""

    device_kind: str
    entries: dict[Site, Entry] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, compare=False)

    def __str__(self) -> str:
        entries = "1 entry" if len(self.entries) == 1 else f"{len(self.entries)} entries"
        where = f", in {self.path}" if self.path else ""
        return f"table of {self.device_kind}: {entries}{where}"

    def of_kind(self, site: Site) -> Sequence[tuple[Site, Entry]]:
        """The sites that are comparable with one, and their entries."""
        return self._by_kind.get(_kind(site), ())

    @functools.cached_property
    def _by_kind(self) -> Mapping[tuple, Sequence[tuple[Site, Entry]]]:
        # Every decision asks: of all entries it would take a millisecond.
        kinds = collections.defaultdict(list)
        for site, entry in self.entries.items():
            kinds[_kind(site)].append((site, entry))
        return kinds

    @classmethod
    def read(cls, text: str) -> Table:
        """The table of a file's text.

        Raises:
          ValueError: if the text is not that of a table, saying what is wrong.
        """
        try:
            head, *lines = map(json.loads, text.splitlines())
            if head["format"] != FORMAT:
                raise ValueError(f"its format is {head['format']!r}, expected {FORMAT}")
            runs = [Run(**run) for run in head["runs"]]
            return cls(head["device_kind"], dict(_entry_from(line, runs) for line in lines))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def text(self) -> str:
        """The text of the table's file."""
        runs = sorted({entry.run for entry in self.entries.values()})
        head = {
            "format": FORMAT,
            "device_kind": self.device_kind,
            "runs": [asdict(run) for run in runs],
        }
        lines = [
            {
                **_site_fields(site),
                "run": runs.index(entry.run),
                "microseconds": {k: _rounded(1e6 * v) for k, v in entry.seconds.items()},
            }
            for site, entry in sorted(self.entries.items(), key=lambda item: _order(item[0]))
        ]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in (head, *lines))

    def write(self, path: Path) -> None:
        """Replaces the file at `path` in one step: readers see the old table or the new one."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.text())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _site_fields(site: Site) -> dict[str, Any]:
    fields = {
        "op": site.op,
        "devices": site.axis_size,
        "dtype": site.dtype.name,
        "operands": [[*x, w[1]] for x, w in site.operands],
    }
    if site.rider is not None:
        fields["rider"] = list(site.rider)
    if site.keep_gathered:
        fields["keep_gathered"] = True
    return fields


def _kind(site: Site) -> tuple:
    """What sites have in common that differ in sizes alone."""
    rides = site.rider is not None
    is_matmul = site.einsum is None
    work = site.op, site.axis_size, rides, site.keep_gathered, is_matmul
    # What is not aligned takes longer to multiply, which the gains of what is say nothing of.
    return *work, site.dtype.itemsize, site.is_aligned


def _entry_from(line: dict[str, Any], runs: list[Run]) -> tuple[Site, Entry]:
    rider = line.get("rider")
    site = Site(
        op=line["op"],
        operands=tuple(((m, k), (k, n)) for m, k, n in line["operands"]),
        dtype=jnp.dtype(line["dtype"]),
        axis_name="",
        axis_size=int(line["devices"]),
        rider=None if rider is None else (int(rider[0]), int(rider[1])),
        keep_gathered=bool(line.get("keep_gathered", False)),
    )
    seconds = {name: 1e-6 * float(value) for name, value in line["microseconds"].items()}
    if not all(value > 0 for value in (seconds["bulk"], *seconds.values(), *_sizes(site))):
        raise ValueError(f"sizes and times that are not above zero: {line}")
    return site.flat, Entry(seconds, runs[line["run"]])


def _sizes(site: Site) -> Iterator[int]:
    yield from (site.axis_size, site.rows, site.contracted, site.columns)


def _order(site: Site) -> tuple:
    """Layer by layer, the rows of each ascending."""
    weights = tuple(w for _, w in site.operands)
    rider = site.rider is not None
    return site.axis_size, site.dtype.name, weights, site.op, rider, site.keep_gathered, site.rows


def _rounded(microseconds: float) -> float:
    """To four digits: more than a measurement repeats."""
    return float(f"{microseconds:.4g}")
