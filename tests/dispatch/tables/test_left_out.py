"""Answers of the shipped table about each of its entries, if that entry is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, geometric_mean
from typing import cast

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul.dispatch.tables import table_files
from collective_matmul.dispatch.tables.lookup import BRACKET, Comparison, look_up
from collective_matmul.dispatch.tables.table import Entry, Table
from collective_matmul.ops.matmul.backends import BACKENDS, REFERENCE
from collective_matmul.ops.matmul.request import Site
from collective_matmul.peer_access import peer_kernels_allowed
from tests.hopper import needs_kernels
from tests.reference import AXIS

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
OTHERS = [name for name in BACKENDS if name != REFERENCE.name]


def left_out() -> Iterator[tuple[Site, Entry, dict[str, Comparison]]]:
    """Each entry between two others of its layer, and what the table without it says."""
    ((_, table),) = table_files.known("NVIDIA H200")
    for site, entry in table.entries.items():
        rest = Table(table.device_kind, {s: e for s, e in table.entries.items() if s != site})
        layer = [s.rows for s, _ in rest.of_kind(site) if _sizes(cast(Site, s)) == _sizes(site)]
        fewer = max((rows for rows in layer if rows < site.rows), default=0)
        more = min((rows for rows in layer if rows > site.rows), default=math.inf)
        if more <= 2**BRACKET * fewer:
            names = [name for name in entry.seconds if name in OTHERS]
            found = {name: look_up(site, name, [("here", rest)], OTHERS) for name in names}
            yield site, entry, {name: c for name, c in found.items() if c}


def _sizes(site: Site) -> tuple[int, int]:
    return site.contracted, site.columns


@pytest.fixture(scope="module")
def answers() -> list[tuple[Site, Entry, dict[str, Comparison]]]:
    mesh = AbstractMesh((1,), (AXIS,), (AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh), peer_kernels_allowed(True):
        found = list(left_out())
    assert len(found) > 100
    return found


@needs_kernels
@pytest.mark.needs("fused", "one_shot")
def test_what_is_chosen_between_entries_is_nearly_the_fastest(answers: list) -> None:
    """The reference takes 1.3 times as long as the fastest; nothing slower than it is chosen."""
    losses = []
    for site, entry, found in answers:
        believed = {name: c.seconds for name, c in found.items() if c.is_believed}
        chosen = entry.seconds[min(believed, key=believed.__getitem__, default=REFERENCE.name)]
        assert chosen < 1.02 * entry.seconds[REFERENCE.name], site
        losses.append(chosen / min(entry.seconds[name] for name in (REFERENCE.name, *found)))
    assert geometric_mean(losses) < 1.02


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("fused", 0.08, marks=[pytest.mark.needs("fused"), needs_kernels]),
        pytest.param("one_shot", 0.08, marks=[pytest.mark.needs("one_shot"), needs_kernels]),
        ("ring", 0.2),
    ],
)
def test_times_between_entries(name: str, most: float, answers: list) -> None:
    """Errors as logarithms. Entries are up to three doublings apart if one is left out."""
    errors = [
        abs(math.log(found[name].seconds / entry.seconds[name]))
        for _, entry, found in answers
        if name in found
    ]
    assert len(errors) > 25 and fmean(errors) < most
