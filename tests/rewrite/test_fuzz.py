"""Random programs agree with their rewritten forms, and would not if a ring were wrong."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import lax

from tests.rewrite.fuzz import mismatches

BLOCK = 25
#: Numbers of programs.
SHORT_SEARCH, LONG_SEARCH = 25, 2000


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < SHORT_SEARCH else pytest.mark.exhaustive)
        for first in range(0, LONG_SEARCH, BLOCK)
    ],
)
def test_random_programs_agree_with_their_rewritten_form(first: int) -> None:
    assert not mismatches(range(first, first + BLOCK))


def test_a_reversed_permute_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    permute = lax.ppermute

    def reversed_permute(
        x: jax.Array, axis_name: str, perm: list[tuple[int, int]], **kwargs: Any
    ) -> Any:
        return permute(x, axis_name, [(to, source) for source, to in perm], **kwargs)

    monkeypatch.setattr(lax, "ppermute", reversed_permute)
    assert mismatches(range(8))
