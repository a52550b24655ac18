"""Random programs agree with their rewriting, and would not if a ring went wrong."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import lax

from tests.rewrite.fuzz import mismatches

BLOCK = 25
SHORT_SEARCH, LONG_SEARCH = 50, 1000  # Programs.


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < SHORT_SEARCH else pytest.mark.exhaustive)
        for first in range(0, LONG_SEARCH, BLOCK)
    ],
)
def test_random_programs(first: int) -> None:
    assert not mismatches(range(first, first + BLOCK))


def test_a_permute_turned_the_wrong_way_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    permute = lax.ppermute

    def turned(x: jax.Array, axis_name: str, perm: list[tuple[int, int]], **kwargs: Any) -> Any:
        return permute(x, axis_name, [(to, source) for source, to in perm], **kwargs)

    monkeypatch.setattr(lax, "ppermute", turned)
    assert mismatches(range(8))
