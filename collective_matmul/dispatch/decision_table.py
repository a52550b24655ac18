"""Decisions, and collectives that are left alone, as a table of text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collective_matmul.dispatch.recording import Decision
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.source_location import SourceLocation

#: Characters in a line of a table.
WIDTH = 120
#: The columns that get lines of their own where a table would be wider.
_LONG, _INDENT = ("where", "local shapes", "dtypes", "why"), "    "

_HEAD = (
    *("runs", "where", "pass", "op", "local shapes", "dtypes"),
    *("chosen", "µs", f"{REFERENCE} µs", "gain", "why"),
)


@dataclass(frozen=True)
class Line:
    """An op, or a gather or sum over devices in a plain program.

    Attributes:
      source: location in the user's program.
      direction: which pass of an op that the program calls; empty where that is unknown.
      op: its name, or the collective's.
      shapes: the local arrays, to be read.
      chosen: the backend that executes it.
      reason: the reason, in words.
      seconds, reference_seconds: predicted for what was chosen, and for XLA; None if unknown.
      dtypes: what travels between devices and what is multiplied; empty where `shapes` says it.
    """

    source: SourceLocation | None
    direction: str
    op: str
    shapes: str
    chosen: str
    reason: str
    seconds: float | None = None
    reference_seconds: float | None = None
    dtypes: str = ""

    @property
    def gain(self) -> str:
        """Microseconds and ratio against XLA; empty if unknown."""
        if not self.seconds or not self.reference_seconds:
            return ""
        gained = (self.reference_seconds - self.seconds) * 1e6
        return f"{gained:.0f} µs ({self.reference_seconds / self.seconds:.2f}×)"


def line_of(decision: Decision) -> Line:
    """The line of an op, whether the program called it or `overlap` put it there."""
    site = decision.site
    # A plain program may already be differentiated: its gathers may belong to either pass.
    known = site.direction == "backward" or site.replaces is None
    return Line(
        site.source,
        site.direction if known else "",
        site.op,
        site.shapes,
        f"{decision.implementation} by overlap" if site.replaces else decision.implementation,
        decision.reason,
        decision.seconds,
        decision.reference_seconds,
        site.line_dtypes(decision.multiplied_dtypes),
    )


def format_table(
    lines: Iterable[Line], runs: Mapping[Line, int] | None = None, width: int = WIDTH
) -> str:
    """A table with a header. Equal lines become one with a count; empty columns are left out.

    Args:
      lines: the lines.
      runs: how often a run of the program executes what a line is about; default: once for each of
        the equal lines.
      width: the number of characters in a line. Where the table would be wider, places, shapes and
        reasons are on lines of their own.
    """
    counts = {**Counter(lines), **(runs or {})}
    rows = [
        (
            f"{count}×",
            str(line.source or "?"),
            line.direction,
            line.op,
            line.shapes,
            line.dtypes,
            line.chosen,
            _microseconds(line.seconds),
            _microseconds(line.reference_seconds),
            line.gain,
            line.reason,
        )
        for line, count in counts.items()
    ]
    columns = [column for column in zip(_HEAD, *rows, strict=True) if any(column[1:])]
    table = [*zip(*columns, strict=True)]
    aligned = _aligned(table)
    return "\n".join(aligned if max(map(len, aligned)) <= width else _in_paragraphs(table, width))


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _in_paragraphs(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Short cells in columns; beneath each line the long ones, wrapped."""
    head, *_ = rows
    short = [i for i, title in enumerate(head) if title not in _LONG]
    columns = _aligned([[row[i] for i in short] for row in rows])
    lines = []
    for line, row in zip(columns, rows, strict=True):
        lines.append(line)
        texts = [text for i, text in enumerate(row) if i not in short and text]
        for text in (", ".join(texts),) if row is head else texts:
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=_INDENT,
                subsequent_indent=f"{_INDENT}  ",
                break_on_hyphens=False,
            )
    return lines
