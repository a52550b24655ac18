"""Default cases hold every pair of values, and with the exhaustive ones every triple."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.covering import cover, pairwise
from tests.ops.matmul.test_ops import CASES, PRODUCT
from tests.reference import OPS, PORTABLE


def default(parameters: list[Any]) -> list[Any]:
    """Values of the parameters that are not exhaustive."""
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_every_pair_and_every_triple_of_values_is_held() -> None:
    sizes = {"a": 3, "b": 4, "c": 2, "d": 2}
    names, rows = pairwise(**{name: range(size) for name, size in sizes.items()}).args
    assert names == list(sizes)
    every = [row.values for row in rows]
    assert every == sorted(every)
    assert len(set(every)) == len(every) <= 30  # Of 48; the triples of a, b, and c alone need 24.
    for three in itertools.combinations(range(len(sizes)), 3):
        held = {tuple(values[factor] for factor in three) for values in every}
        assert len(held) == math.prod([*sizes.values()][factor] for factor in three)
    chosen = default(rows)
    assert len(chosen) <= 14  # Of 48; the pairs of a and b alone need 12.
    for (i, first), (j, second) in itertools.combinations(enumerate(sizes.values()), 2):
        assert len({(values[i], values[j]) for values in chosen}) == first * second


def test_invalid_combinations_are_not_demanded() -> None:
    cases = [(a, b) for a in range(3) for b in range(3) if a <= b]
    chosen = default(cover(cases, lambda case: {"a": case[0], "b": case[1]}))
    assert [case for (case,) in chosen] == cases


@pytest.mark.parametrize("other", ["implementation", "dimension", "dtype", "check_vma"])
def test_every_op_meets_every_value_by_default(other: str) -> None:
    held = {(case.op, getattr(case, other)) for (case,) in default(CASES)}
    assert held == {(case.op, getattr(case, other)) for case in PRODUCT}


def test_every_backend_meets_every_dtype_by_default() -> None:
    held = {(case.implementation, case.dtype) for (case,) in default(CASES)}
    assert held >= set(itertools.product(PORTABLE, ["float32", "bfloat16", "float16"]))
    assert {case.op for (case,) in default(CASES)} == set(OPS)
