"""A table of measured seconds by backend; `collective_matmul.data` has the format of its file.

The problems of its records are sites::

    {"op": "all_gather_matmul", "devices": 4, "dtype": "bfloat16", "operands": [[2048, 4096, 3584]]}

Operands are local [M, K, N], an x [M, K] and a w [K, N]; leading dimensions are joined in M. Some
records have more: "co_gathered", [M, K]; "keep_gathered", true; "fp8", the name of a recipe.
"""

from __future__ import annotations

import collections
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp

from collective_matmul.backends import REFERENCE
from collective_matmul.data import UNREADABLE, MeasuredData, Record, Run
from collective_matmul.operands.format import PLAIN, format_of_fields
from collective_matmul.site import Op, Site

#: What `collective_matmul.data` calls such tables.
MEASURES = "backends"

#: The name, among those of backends, of the matmuls alone: the compute-only bound.
COMPUTE_ONLY = "compute_only"


@dataclass(frozen=True)
class Entry:
    """Median seconds of one site by backend, the reference among them, and of `COMPUTE_ONLY`.

    Where a site has a weight gradient, its matmul is included.
    """

    seconds: Mapping[str, float]
    run: Run


def can_have_entry(site: Site) -> bool:
    """Whether tables have entries of such sites: matmuls of whole dimensions and whole weights."""
    return site.einsum is None and site.weight_shards is None


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
            return cls(data.device_kind, dict(map(_entry_from, data.records)))
        except UNREADABLE as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def to_text(self) -> str:
        """The text of the table's file.

        Raises:
          ValueError: for a site that tables have no entries of.
        """
        records = [
            Record(
                _site_fields(site),
                {name: 1e6 * seconds for name, seconds in entry.seconds.items()},
                run=entry.run,
            )
            for site, entry in sorted(self.entries.items(), key=lambda item: _order(item[0]))
        ]
        return MeasuredData(MEASURES, self.device_kind, records).to_text()

    def write(self, path: Path) -> None:
        """Replaces the file at `path` in one step: readers see the old table or the new one."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_text())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _site_fields(site: Site) -> dict[str, Any]:
    if not can_have_entry(site):
        # Its fields would be those of another site.
        raise ValueError(
            f"{site}: an entry in a table; expected a matmul of whole dimensions and whole weights"
        )
    fields = {
        "op": site.op,
        "devices": site.axis_size,
        "dtype": site.dtype.name,
        "operands": [[*x, w[1]] for x, w in site.operands],
    }
    if site.co_gathered is not None:
        fields["co_gathered"] = list(site.co_gathered)
    fields |= site.format.fields
    if site.keep_gathered:
        fields["keep_gathered"] = True
    return fields


def _kind(site: Site) -> tuple:
    """The properties of a site other than its sizes: entries are compared within one kind."""
    has_co_gathered = site.co_gathered is not None
    is_matmul = site.einsum is None
    work = site.op, site.axis_size, has_co_gathered, site.keep_gathered, is_matmul
    # Unaligned matmuls take longer, and gains of aligned ones do not predict theirs. So it is with
    # those in 8 bits of which our kernel leaves chunks to XLA.
    backward = site.direction == "backward"
    is_aligned = (
        site.is_aligned
        if site.format is PLAIN
        else site.format.fits_kernel(site, site.chunk_rows, backward=backward)
    )
    return *work, site.weight_shards, site.format, site.dtype.itemsize, is_aligned


def _entry_from(record: Record) -> tuple[Site, Entry]:
    problem = record.problem
    op, dtype, co_gathered = problem["op"], jnp.dtype(problem["dtype"]), problem.get("co_gathered")
    if op not in get_args(Op) or not jnp.issubdtype(dtype, jnp.floating) or not problem["operands"]:
        raise ValueError(f"no site of an op: {dict(problem)}")
    site = Site(
        op=op,
        operands=tuple(((_size(m), _size(k)), (k, _size(n))) for m, k, n in problem["operands"]),
        dtype=dtype,
        axis_name="",
        axis_size=_size(problem["devices"]),
        co_gathered=None if co_gathered is None else (_size(co_gathered[0]), _size(co_gathered[1])),
        keep_gathered=bool(problem.get("keep_gathered", False)),
        format=format_of_fields(problem),
    )
    if record.run is None:
        raise ValueError(f"no run: {dict(problem)}")
    seconds = {name: 1e-6 * value for name, value in record.microseconds.items()}
    if REFERENCE.name not in seconds:
        raise KeyError(REFERENCE.name)
    return site.flat, Entry(seconds, record.run)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"the size {value!r}, expected a whole number above zero")
    return value


def _order(site: Site) -> tuple:
    """Sort key: layer by layer, the rows of each ascending."""
    weights = tuple(w for _, w in site.operands)
    co_gathered = site.co_gathered is not None
    return (
        site.axis_size,
        site.dtype.name,
        weights,
        site.op,
        co_gathered,
        site.keep_gathered,
        site.format.name,
        site.rows,
    )
