"""Looks up a backend at a site in tables: the site's own entry, or entries of similar sites."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from collective_matmul.dispatch.contract import Backend, Request
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.tables.table import Entry, Table

#: Medians of alternating groups repeat within one percent: a gain of two is no accident.
ERROR = 0.02

#: How far an entry may be from a site, in doublings of the rows. Tables have each layer at rows one
#: or two doublings apart, so every site between two entries is near one at least. Over one doubling
#: the gain of a ring can turn into a loss (0.6 to 1.1 was seen); over more, nothing is known.
REACH = 1.0

#: How many doublings apart two entries of one layer may be for a site of the layer between them.
BRACKET = 3.0


@dataclass(frozen=True)
class Comparison:
    """A backend beside the reference, both by one measurement or one model.

    Attributes:
      seconds: time of the backend.
      reference_seconds: time of the reference.
      relative_error: the comparison is believed if the gain exceeds this fraction.
      basis: source of both times, in words.
      is_own: whether both were measured at this very site.
    """

    seconds: float
    reference_seconds: float
    relative_error: float
    basis: str
    is_own: bool = False

    @property
    def gain(self) -> float:
        """Time of the reference divided by that of the backend."""
        return self.reference_seconds / self.seconds

    @property
    def is_believed(self) -> bool:
        """Whether the gain exceeds the error of the measurement or the model."""
        return self.gain - 1 >= self.relative_error

    def with_reference(self, reference_seconds: float) -> Comparison:
        """A comparison with this gain over a reference of other seconds."""
        seconds = reference_seconds * (self.seconds / self.reference_seconds)
        return replace(self, seconds=seconds, reference_seconds=reference_seconds)


def look_up(
    site: Request, backend: str, tables: Sequence[tuple[str, Table]], usable: Collection[str]
) -> Comparison | None:
    """A backend beside the reference according to measurements, or None.

    The site's own entry is used if there is one. Otherwise, if the same layer was measured with
    fewer and with more rows, both times are interpolated. Otherwise two near entries must agree,
    one with less work and one with more, because a gain may turn into a loss between them. If only
    the smaller exists, its gain is used: a backend that is faster there is faster above. If only
    the larger exists, it is used only if no backend is faster there.

    Args:
      site: the site.
      backend: the name of the backend.
      tables: (origin, table) pairs, best first.
      usable: names of all backends that the program may use.
    """
    flat = site.flat
    own = _own_entry(flat, backend, tables)
    if own is not None:
        return own
    found = {
        other: (entry, origin)
        for origin, table in reversed(tables)
        for other, entry in table.of_kind(flat)
        if backend in entry.seconds
    }
    return _between_entries(flat, backend, found) or _near_entries(flat, backend, found, usable)


def _own_entry(
    site: Request, backend: str, tables: Sequence[tuple[str, Table]]
) -> Comparison | None:
    for origin, table in tables:
        entry = table.entries.get(site)
        if entry is not None and backend in entry.seconds:
            seconds, reference = entry.seconds[backend], entry.seconds[REFERENCE]
            return Comparison(seconds, reference, ERROR, f"measured ({origin})", is_own=True)
    return None


def _between_entries(
    site: Request, backend: str, found: Mapping[Request, tuple[Entry, str]]
) -> Comparison | None:
    """The times of a layer with fewer and with more rows, and between them as models say.

    Its weights take as long to read with any number of rows, and few rows fill tiles that are as
    high as those of more rows: times at the two ends say more than time per operation. If the
    backend is slower than the reference at one end, its gain there counts.
    """
    layer = [other for other in found if other.layer == site.layer]
    fewer = max((o for o in layer if o.rows <= site.rows), key=_rows, default=None)
    more = min((o for o in layer if o.rows >= site.rows), key=_rows, default=None)
    if fewer is None or more is None or math.log2(more.rows / fewer.rows) > BRACKET:
        return None
    ends = found[fewer][0], found[more][0]
    share = 0.0 if fewer is more else site.doublings(fewer) / more.doublings(fewer)

    # Models know the tiles and the padding of each number of rows. What they are wrong by changes
    # slowly: it is a straight line in logarithms. So are both times where one has no model.
    names, sites = (REFERENCE, backend), (fewer, site, more)
    predicted = [_predicted(site.backends[name], sites) for name in names]
    models = [each for each in predicted if each is not None]
    if len(models) < len(names):
        models = [(1.0, 1.0, 1.0)] * len(names)

    def interpolated(name: str) -> float:
        first, here, last = models[names.index(name)]
        low, high = (entry.seconds[name] for entry in ends)
        low, high = low / first, high / last
        return here * low * (high / low) ** share

    reference = interpolated(REFERENCE)
    least = min(_gain(entry, backend) for entry in ends)
    seconds = reference / least if least < 1 else interpolated(backend)
    nearest = min((fewer, more), key=site.doublings)
    return Comparison(seconds, reference, ERROR, f"near what was measured ({found[nearest][1]})")


def _predicted(backend: Backend, sites: Sequence[Request]) -> tuple[float, ...] | None:
    """The seconds of sites by a backend's model; None if it has none for one of them."""
    predictions = [backend.predict(site) for site in sites]
    seconds = tuple(each.seconds for each in predictions if each is not None)
    return seconds if len(seconds) == len(sites) else None


def _near_entries(
    site: Request,
    backend: str,
    found: Mapping[Request, tuple[Entry, str]],
    usable: Collection[str],
) -> Comparison | None:
    near = sorted((other for other in found if site.doublings(other) <= REACH), key=site.doublings)
    smaller = next((other for other in near if other.flops <= site.flops), None)
    larger = next((other for other in near if other.flops >= site.flops), None)
    if not near:
        return None
    gain = min(_gain(found[other][0], backend) for other in (smaller, larger) if other is not None)
    entry, origin = found[near[0]]
    if smaller is None and _best_gain(entry, usable) >= 1 + ERROR:
        return None
    reference = entry.seconds[REFERENCE] * site.flops / near[0].flops
    return Comparison(reference / gain, reference, ERROR, f"near what was measured ({origin})")


def _rows(site: Request) -> int:
    return site.rows


def _gain(entry: Entry, backend: str) -> float:
    return entry.seconds[REFERENCE] / entry.seconds[backend]


def _best_gain(entry: Entry, usable: Collection[str]) -> float:
    return max(_gain(entry, name) for name in entry.seconds if name in usable)
