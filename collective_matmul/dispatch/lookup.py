"""What tables say of a site: its own entry, or those of sites that are nearly the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from collective_matmul.dispatch.table import COMPUTE_ONLY, Entry, Table
from collective_matmul.site import Site

#: Medians of alternating groups repeat within one percent: a gain of two is no accident.
MARGIN = 0.02

#: How far an entry may be from a site, in doublings of the rows. Tables hold each layer at rows one
#: or two doublings apart, so every site between two entries is near one at least. Over one doubling
#: the gain of a ring can turn into a loss (0.6 to 1.1 was seen), over more nothing is known.
REACH = 1.0

#: A doubling of K or N counts as so many of the rows. They also decide how tiles fill waves, and
#: how much there is to communicate for each operation, which rows change alike.
WEIGHT_OF_K_AND_N = 2.0


@dataclass(frozen=True)
class Prediction:
    """Seconds that a site will take by implementation, bulk among them.

    Attributes:
      seconds: by the name of the implementation.
      margin: the gain over bulk, as a fraction, from which on it is believed.
      basis: what the seconds rest on.
      margins: of implementations that another margin holds for.
      bases: what the seconds of those rest on that rest on something else.
    """

    seconds: Mapping[str, float]
    margin: float
    basis: str
    margins: Mapping[str, float] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)

    def fastest(self, allowed: Container[str]) -> str:
        """The fastest of those allowed whose gain over bulk is believed; bulk if there is none."""
        bulk = self.seconds["xla"]
        believed = {
            name: value
            for name, value in self.seconds.items()
            if name in allowed and bulk / value - 1 >= self.margins.get(name, self.margin)
        }
        return min(believed, key=believed.__getitem__, default="xla")

    def beside(self, other: Prediction) -> Prediction:
        """This, and what another says of implementations that this says nothing of."""
        scale = self.seconds["xla"] / other.seconds["xla"]
        new = other.seconds.keys() - self.seconds.keys()
        return replace(
            self,
            seconds={**self.seconds, **{name: scale * other.seconds[name] for name in new}},
            margins={**self.margins, **{n: other.margins.get(n, other.margin) for n in new}},
            bases={**self.bases, **{n: other.bases.get(n, other.basis) for n in new}},
        )


def look_up(
    site: Site, tables: Sequence[tuple[str, Table]], left_out: Collection[str] = ()
) -> Prediction | None:
    """What measurements tell of a site, or None.

    Its own entry if there is one. Else two near entries must agree, one of no less work and one of
    no more: between them the gain may have its crossing. With the smaller alone its gain is
    believed, since a ring that pays there pays above; with the larger alone only that nothing pays.

    Args:
      site: what is to be predicted.
      tables: each with where it is from, best first.
      left_out: implementations that nothing is asked of, and that entries need not agree on.
    """
    return _own_entry(site.flat, tables, left_out) or _near_entries(site.flat, tables, left_out)


def _own_entry(
    site: Site, tables: Sequence[tuple[str, Table]], left_out: Collection[str]
) -> Prediction | None:
    for origin, table in tables:
        entry = table.entries.get(site)
        if entry is not None and _compares(entry, left_out):
            seconds, basis = _choosable(entry, left_out), f"measured ({origin})"
            return Prediction(seconds, MARGIN, basis)
    return None


def _near_entries(
    site: Site, tables: Sequence[tuple[str, Table]], left_out: Collection[str]
) -> Prediction | None:
    found = {
        other: (entry, origin)
        for origin, table in reversed(tables)
        for other, entry in table.of_kind(site)
        if _compares(entry, left_out)
    }
    distance = functools.partial(_doublings, site)
    near = sorted((other for other in found if distance(other) <= REACH), key=distance)
    smaller = next((other for other in near if other.flops <= site.flops), None)
    larger = next((other for other in near if other.flops >= site.flops), None)
    if not near:
        return None
    around = [found[other][0] for other in (smaller, larger) if other is not None]
    gains = _smallest_gains([_choosable(entry, left_out) for entry in around])
    if smaller is None and max(gains.values()) >= 1 + MARGIN:
        return None
    entry, origin = found[near[0]]
    bulk = entry.seconds["xla"] * site.flops / near[0].flops
    seconds = {name: bulk / gain for name, gain in gains.items()}
    return Prediction(seconds, MARGIN, f"near what was measured ({origin})")


def _compares(entry: Entry, left_out: Collection[str]) -> bool:
    """Whether an entry tells of anything to choose but bulk: some have kernels alone."""
    return not entry.seconds.keys() <= {"xla", COMPUTE_ONLY, *left_out}


def _choosable(entry: Entry, left_out: Collection[str]) -> dict[str, float]:
    """Seconds of all that can be chosen for what an entry says."""
    excluded = {COMPUTE_ONLY, *left_out}
    return {name: value for name, value in entry.seconds.items() if name not in excluded}


def _smallest_gains(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By implementation that all entries' seconds have, its smallest gain over bulk."""
    names = set.intersection(*map(set, entries))
    return {
        name: min(seconds["xla"] / seconds[name] for seconds in entries) for name in sorted(names)
    }


def _doublings(site: Site, other: Site) -> float:
    """How far two flat sites of one kind are apart."""
    rows = math.log2(site.rows / other.rows)
    contracted = math.log2(site.contracted / other.contracted)
    columns = math.log2(site.columns / other.columns)
    return max(abs(rows), WEIGHT_OF_K_AND_N * max(abs(contracted), abs(columns)))
