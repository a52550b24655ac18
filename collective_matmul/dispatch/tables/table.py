"""A table of measured seconds by backend; `collective_matmul.data` has the format of its file.

The problems of its records are flat requests, as `Request.fields` returns them. "op" is the name of
the op that reads them.
"""

from __future__ import annotations

import collections
import functools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collective_matmul.data import UNREADABLE, MeasuredData, Record, Run
from collective_matmul.dispatch.contract import COMPUTE_ONLY as COMPUTE_ONLY
from collective_matmul.dispatch.contract import Request, UnregisteredError
from collective_matmul.dispatch.registry import OPS, REFERENCE

#: What `collective_matmul.data` calls such tables.
MEASURES = "backends"


@dataclass(frozen=True)
class Entry:
    """Median seconds of one site by backend, the reference among them, and of `COMPUTE_ONLY`.

    Where a request has a weight gradient, its matmul is included.
    """

    seconds: Mapping[str, float]
    run: Run


@dataclass
class Table:
    """Entries of one kind of device by flat requests.

    Attributes:
      device_kind: the kind of device.
      entries: the entries by flat request.
      path: the file they are in, if any.
      unread: entries of ops, or of formats of operands, that this program has not registered. They
        are written back.
    """

    device_kind: str
    entries: dict[Any, Entry] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, compare=False)
    unread: tuple[Record, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        entries = "1 entry" if len(self.entries) == 1 else f"{len(self.entries)} entries"
        where = f", in {self.path}" if self.path else ""
        return f"table of {self.device_kind}: {entries}{where}"

    def of_kind(self, site: Request) -> Sequence[tuple[Request, Entry]]:
        """The sites that are comparable with one, and their entries."""
        return self._by_kind.get(_kind(site), ())

    @functools.cached_property
    def _by_kind(self) -> Mapping[tuple, Sequence[tuple[Request, Entry]]]:
        # Every decision asks. Searching all entries would take a millisecond.
        kinds = collections.defaultdict(list)
        for site, entry in self.entries.items():
            kinds[_kind(site)].append((site, entry))
        return kinds

    @classmethod
    def from_text(cls, text: str) -> Table:
        """The table of a file's text.

        Raises:
          ValueError: if the text is not that of a table, saying what is wrong.
        """
        return cls.from_data(MeasuredData.from_text(text))

    @classmethod
    def from_data(cls, data: MeasuredData) -> Table:
        """The table of a file's content.

        Raises:
          ValueError: if the content is not that of a table, saying what is wrong.
        """
        try:
            if data.measures != MEASURES:
                raise ValueError(f"it measures {data.measures!r}, expected {MEASURES!r}")
            entries, unread = {}, []
            for record in data.records:
                try:
                    site = _site_of(record)
                except UnregisteredError:
                    unread.append(record)
                else:
                    entries[site] = _entry_of(record)
            return cls(data.device_kind, entries, unread=tuple(unread))
        except UNREADABLE as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def to_text(self) -> str:
        """The text of the table's file.

        Raises:
          ValueError: for a site that tables have no entries of.
        """
        records = [
            Record(
                site.fields(),
                {name: 1e6 * seconds for name, seconds in entry.seconds.items()},
                run=entry.run,
            )
            for site, entry in sorted(self.entries.items(), key=lambda item: _order(item[0]))
        ]
        return MeasuredData(MEASURES, self.device_kind, [*records, *self.unread]).to_text()

    def write(self, path: Path) -> None:
        """Replaces the file at `path` in one step: readers see the old table or the new one."""
        # Not by tempfile, whose files only their owner reads.
        written = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            written.write_text(self.to_text(), encoding="utf-8")
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise


def _kind(site: Request) -> tuple:
    """Entries are compared within one kind, and requests of one class have kinds in common."""
    return type(site), site.kind


def _site_of(record: Record) -> Request:
    """The site of a record.

    Raises:
      UnregisteredError: if no registered op reads it.
    """
    problem = record.problem
    name = problem["op"]
    if not isinstance(name, str):
        raise ValueError(f"no site of an op: {dict(problem)}")
    if name not in OPS:
        raise UnregisteredError(name)
    return OPS[name].request_of(problem)


def _entry_of(record: Record) -> Entry:
    if record.run is None:
        raise ValueError(f"no run: {dict(record.problem)}")
    seconds = {name: 1e-6 * value for name, value in record.microseconds.items()}
    if REFERENCE not in seconds:
        raise KeyError(REFERENCE)
    return Entry(seconds, record.run)


def _order(site: Request) -> tuple:
    """Sort key: one class of requests after the other."""
    return type(site).__qualname__, site.order
