"""Random programs over Explicit axes agree with their rewritten forms; planted mistakes do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import _compat
from collective_matmul.rewrite.find import explicit_regions, manual_regions, placements
from collective_matmul.rewrite.match import weight_gathers
from tests.rewrite.explicit_fuzz import search

#: Numbers of draws: in each test, in the short search and in the long one.
BLOCK, SHORT_SEARCH, LONG_SEARCH = 50, 50, 300


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < SHORT_SEARCH else pytest.mark.exhaustive)
        for first in range(0, LONG_SEARCH, BLOCK)
    ],
)
def test_random_programs_agree_with_their_rewritten_form(first: int) -> None:
    result = search(range(first, first + BLOCK))
    assert not result.findings
    # Otherwise the search would agree with anything. Blocks have between 7 and 60 sites.
    assert result.programs > 0.9 * BLOCK
    assert result.sites > BLOCK / 10


def gather_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = lax.all_gather

    def wrong(x: jax.Array, axis_name: str, *, axis: int, **kwargs: Any) -> jax.Array:
        return gather(x, axis_name, axis=axis, **kwargs)[::-1]

    monkeypatch.setattr(manual_regions.lax, "all_gather", wrong)


def gather_over_another_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    made = explicit_regions.ManualRegion

    def wrong(axes: frozenset[str], anchor: int, equations: Any, gathered: Any = None, **kw: Any):
        gathered = {
            var: ({"d": "t", "t": "d", "f": "d"}[axis], dimension)
            for var, (axis, dimension) in (gathered or {}).items()
        }
        return made(axes, anchor, equations, gathered, **kw)

    monkeypatch.setattr(explicit_regions, "ManualRegion", wrong)


def lose_a_reshard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves what a later reshard would sum as a summand of each device."""
    monkeypatch.setattr(manual_regions._LocalRegion, "_sum", lambda self, var, array: array)


def lose_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    original = manual_regions._LocalRegion._sum

    def wrong(self: Any, var: Any, array: jax.Array) -> jax.Array:
        dimension = placements.placement(var, self._region.summed)
        if dimension is None:
            return array
        return original(self, var, array)

    monkeypatch.setattr(manual_regions._LocalRegion, "_sum", wrong)


def take_a_part_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the wrong type: over the axis of a site, nothing is sharded."""
    monkeypatch.setattr(manual_regions, "only_axes", lambda spec, axes: P())


def forget_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    original = manual_regions.ManualRegion.outputs
    region = manual_regions.ManualRegion

    def wrong(self: Any, graph: Any) -> list:
        return original(replace(self, equations=self.equations[-1:]), graph)

    monkeypatch.setattr(region, "outputs", wrong)


def divide_weights_along_the_other_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    original = weight_gathers._matrix_dimension

    def wrong(matmul: Any, dimension: int) -> int | None:
        found = original(matmul, dimension)
        return None if found is None else 1 - found

    monkeypatch.setattr(weight_gathers, "_matrix_dimension", wrong)


def forget_the_order_of_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension is gathered over the first of its axes as over the last."""
    for module in (manual_regions, placements):
        monkeypatch.setattr(module, "is_minor", lambda atom, axis: True)


def sum_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside axes that are left to the compiler, which then ends the process."""
    monkeypatch.setattr(_compat, "ends_the_process", lambda dtype: False)


#: Each with the seed at which the search begins: shortly before the first that finds it.
MISTAKES = [
    (gather_in_another_order, 90),
    (gather_over_another_axis, 0),
    (lose_a_reshard, 80),
    (lose_a_sum, 80),
    (take_a_part_for_the_whole, 0),
    (forget_a_result, 20),
    (divide_weights_along_the_other_dimension, 0),
    (forget_the_order_of_axes, 0),
    (sum_in_16_bits, 85),
]


@pytest.mark.parametrize("plant, first", MISTAKES)
def test_a_mistake_is_found(plant: Callable, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    result = search(range(first, first + 16 * BLOCK), stop=1)
    assert result.findings
