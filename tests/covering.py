"""Covering subsets of products of parameters: few cases that hold every pair of values.

Most mistakes show at one value or at a pair of values (Kuhn, Wallace and Gallo, Software Fault
Interactions and Implications for Software Testing, 2004). `make test` runs the cases of such a
subset; those that are left have the marker `exhaustive`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest


def cover(
    cases: Sequence[Any],
    factors: Callable[[Any], Mapping[str, Hashable]],
    *,
    ids: Callable[[Any], str] | None = None,
) -> list[Any]:
    """All cases as parameters for pytest; those that a covering subset leaves out are exhaustive.

    Args:
      cases: from which the subset is chosen, each valid by itself.
      factors: the values of a case, by factor. Each pair of values that any case holds is held by
        a case of the subset.
      ids: names a case.

    Returns:
      A `pytest.param` for each case, in the order given.
    """
    chosen = _covering(cases, factors)
    return [
        pytest.param(
            case,
            id=ids(case) if ids else None,
            marks=() if index in chosen else pytest.mark.exhaustive,
        )
        for index, case in enumerate(cases)
    ]


def covering(cases: Sequence[Any], factors: Callable[[Any], Mapping[str, Hashable]]) -> list[Any]:
    """The covering subset alone, for products that are too large to run at all; see `cover`."""
    return [cases[index] for index in sorted(_covering(cases, factors))]


def pairwise(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by the product of all factors, of which a covering subset is default.

    Example:
      @pairwise(op=OPS, devices=[1, 2, 4], dtype=["float32", "bfloat16"])
      def test_values(op, devices, dtype): ...
    """
    names = list(factors)
    # Values need not be hashable: their positions stand for them.
    positions = list(itertools.product(*(range(len(values)) for values in factors.values())))
    marks = cover(positions, lambda case: dict(zip(names, case, strict=True)))
    rows = [
        pytest.param(
            *(factors[name][position] for name, position in zip(names, case, strict=True)),
            marks=parameter.marks,
        )
        for case, parameter in zip(positions, marks, strict=True)
    ]
    return pytest.mark.parametrize(names, rows)


def _covering(cases: Sequence[Any], factors: Callable[[Any], Mapping[str, Hashable]]) -> set[int]:
    """Indices of the cases chosen: greedily, the one that holds most of what no other holds yet.

    Of cases that hold as much the first is taken, so that every process chooses the same.
    """
    held = [set(itertools.combinations(sorted(factors(case).items()), 2)) for case in cases]
    missing = set().union(*held)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(held[index] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen
