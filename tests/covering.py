"""Covering subsets of products of parameters: few cases that hold every pair of values.

Most mistakes show at one value or at a pair of values, and nearly all at three (Kuhn, Wallace and
Gallo, Software Fault Interactions and Implications for Software Testing, 2004). `make test` runs
cases that hold every pair. Those with the marker `exhaustive` hold every triple with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import pytest


def cover(
    cases: Sequence[Any],
    factors: Callable[[Any], Mapping[str, Hashable]],
    *,
    ids: Callable[[Any], str] | None = None,
) -> list[Any]:
    """Cases that hold every triple of values; those that the pairs do not need are exhaustive.

    Args:
      cases: of which some are chosen, each valid by itself.
      factors: the values of a case, by factor. Each pair of values that any case holds is held by
        a case without the marker, and each triple by a case. Cases of three factors are all there.
      ids: names a case.

    Returns:
      A `pytest.param` for each case that is chosen, in the order given.
    """
    pairs = _covering(cases, factors)
    return [
        pytest.param(
            cases[index],
            id=ids(cases[index]) if ids else None,
            marks=() if index in pairs else pytest.mark.exhaustive,
        )
        for index in sorted(_covering(cases, factors, 3, pairs))
    ]


def covering(
    cases: Sequence[Any], factors: Callable[[Any], Mapping[str, Hashable]], strength: int = 2
) -> list[Any]:
    """Few cases that hold every pair of values, or with a strength of 1 every value."""
    return [cases[index] for index in sorted(_covering(cases, factors, strength))]


def pairwise(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by values of all factors: each pair by default, each triple exhaustively.

    Example:
      @pairwise(op=OPS, devices=[1, 2, 4], dtype=["float32", "bfloat16"])
      def test_values(op, devices, dtype): ...
    """
    names = list(factors)
    # Values need not be hashable: their positions stand for them.
    positions = list(itertools.product(*(range(len(values)) for values in factors.values())))
    rows = [
        pytest.param(
            *(factors[name][at] for name, at in zip(names, parameter.values[0], strict=True)),
            marks=parameter.marks,
        )
        for parameter in cover(positions, lambda case: dict(zip(names, case, strict=True)))
    ]
    return pytest.mark.parametrize(names, rows)


def _covering(
    cases: Sequence[Any],
    factors: Callable[[Any], Mapping[str, Hashable]],
    strength: int = 2,
    given: Set[int] = frozenset(),
) -> set[int]:
    """Indices of cases that hold, with those given, all that any holds of so many values together.

    They are chosen greedily: the one that holds most of what no other holds yet. Of cases that hold
    as much the first is taken, so that every process chooses the same.
    """
    values = [sorted(factors(case).items()) for case in cases]
    held = [set(itertools.combinations(each, min(strength, len(each)))) for each in values]
    missing = set().union(*held).difference(*(held[index] for index in given))
    chosen = set(given)
    while missing:
        best = max(range(len(cases)), key=lambda index: len(held[index] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen
