"""Sets of times: sorted, disjoint intervals."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def gaps(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The parts of the window that no interval covers."""
    edges = [window[0], *(edge for interval in intervals for edge in interval), window[1]]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, end) for start, end in pairs if start < end]


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
