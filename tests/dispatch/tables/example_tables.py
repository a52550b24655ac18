"""Tables to write, read and look up in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from collective_matmul.data import Run
from collective_matmul.dispatch.tables import lookup
from collective_matmul.dispatch.tables.lookup import Comparison
from collective_matmul.dispatch.tables.table import Entry, Table
from collective_matmul.ops.matmul.request import Site
from tests.dispatch.sites import site_of

RUN = Run("2026-11-21", "0.11.2", "4 × NVIDIA H200")
KIND = "NVIDIA H200"


def entry(run: Run = RUN, **microseconds: float) -> Entry:
    return Entry({name: 1e-6 * value for name, value in microseconds.items()}, run)


def table_of(*entries: tuple[Site, Entry]) -> Table:
    return Table(KIND, {site.flat: entry for site, entry in entries})


def layer(rows: int, columns: int = 14336) -> Site:
    """A site of the kind that the tables have entries of; sizes are global."""
    return site_of("all_gather_matmul", rows, 4096, columns)


def measure_as(patch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> None:
    """Has every site measured: the reference and other backends, by their seconds."""

    def look_up(site: Site, name: str, *_: Any) -> Comparison | None:
        if name not in seconds:
            return None
        return Comparison(seconds[name], seconds["xla"], lookup.ERROR, "measured")

    patch.setattr(lookup, "look_up", look_up)
