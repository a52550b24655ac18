"""Differences between two snapshots, with equal differences in one group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

#: Examples of each group that are printed.
_EXAMPLES = 3
#: Largest relative difference between equal predictions.
_TOLERANCE = 1e-9
#: Values longer than this are cut when they are printed.
_LONG = 300


class Difference(NamedTuple):
    """A difference in one entry.

    Attributes:
      section: the kind of facts.
      what: the difference, which other entries may have too.
      entry: the entry's name.
      old: the old value.
      new: the new value.
    """

    section: str
    what: str
    entry: str
    old: Any
    new: Any


def report(
    old: Mapping[str, Any], new: Mapping[str, Any], without: Collection[str] = ()
) -> tuple[str, bool]:
    """A report of all differences, and whether there are none.

    Args:
      old: a snapshot.
      new: another snapshot.
      without: names of primitives whose number does not matter.
    """
    groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    lines, changed = [], set()
    for each in differences(old, new, without):
        groups[each.section, each.what].append(each)
        changed.add((each.section, each.entry))
    for (section, what), found in sorted(groups.items(), key=lambda g: (g[0][0], -len(g[1]))):
        lines.append(f"{section}: {what}: {len(found)}")
        for each in found[:_EXAMPLES]:
            lines += [f"    {each.entry}", *_values(each)]
        if len(found) > _EXAMPLES:
            lines.append(f"    and {len(found) - _EXAMPLES} more")
    for section in sorted(_sections(old) | _sections(new)):
        count = sum(1 for name, _ in changed if name == section)
        total = len(old.get(section, {}).keys() | new.get(section, {}).keys())
        lines.append(f"{section}: {count} of {total} entries differ")
    return "\n".join(lines), not groups


def _sections(snapshot: Mapping[str, Any]) -> set[str]:
    return set(snapshot) - {"about"}


def _values(difference: Difference) -> Iterator[str]:
    for name, value in (("old", difference.old), ("new", difference.new)):
        if value is not None:
            text = str(value)
            yield f"        {name}: {text[:_LONG]}{' …' * (len(text) > _LONG)}"


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], without: Collection[str] = ()
) -> Iterator[Difference]:
    """All differences between two snapshots."""
    about = old.get("about"), new.get("about")
    if about[0] != about[1]:
        yield Difference("about", "versions differ, and much may for that reason", "", *about)
    for section in sorted(_sections(old) | _sections(new)):
        entries = old.get(section), new.get(section)
        if entries[0] is None or entries[1] is None:
            where = "old" if entries[0] is None else "new"
            yield Difference(section, f"is missing in the {where} snapshot", "", None, None)
            continue
        for name in sorted(entries[0].keys() | entries[1].keys()):
            before, after = entries[0].get(name), entries[1].get(name)
            if before is None or after is None:
                what = "only in the new snapshot" if before is None else "only in the old snapshot"
                yield Difference(section, what, name, None, None)
                continue
            for what, *values in _of_entry(before, after, without):
                yield Difference(section, what, name, *values)


def _of_entry(
    old: Mapping[str, Any], new: Mapping[str, Any], without: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Differences between two entries: what, the old value, the new value."""
    if ("error" in old) != ("error" in new):
        what = "raises an error now" if "error" in new else "raises no error any more"
        yield what, old.get("error"), new.get("error")
        return
    for field in sorted(old.keys() | new.keys()):
        before: Any = old.get(field)
        after: Any = new.get(field)
        if field == "decisions" and before is not None and after is not None:
            yield from _of_decisions(before, after)
        elif isinstance(before, dict) and isinstance(after, dict):
            for name in sorted(before.keys() | after.keys()):
                counts = before.get(name, 0), after.get(name, 0)
                if counts[0] != counts[1] and name not in without:
                    yield f"{field}: {name} {_growth(*counts)}", None, None
        elif not _equal(before, after):
            growth = f" {_growth(before, after)}" if isinstance(before, int) else ""
            yield f"{field}{growth}", before, after


def _of_decisions(old: list[Any], new: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    if len(old) != len(new):
        before, after = ([each["implementation"] for each in taken] for taken in (old, new))
        yield f"{len(old)} decisions are {len(new)}", before, after
        return
    for before, after in zip(old, new, strict=True):
        for field in sorted(before.keys() | after.keys()):
            values = before.get(field), after.get(field)
            if not _equal(*values):
                names = f" {values[0]} → {values[1]}" if field == "implementation" else ""
                yield f"decision: {field}{names}", *values


def _growth(old: Any, new: Any) -> str:
    return f"{new - old:+}" if isinstance(new, int) else f"{old} → {new}"


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=_TOLERANCE)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(_equal, old, new))
    return bool(old == new)
