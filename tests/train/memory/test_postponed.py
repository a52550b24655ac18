"""The order of operations that nothing waits for, and what loops with collectives copy."""

from __future__ import annotations

import pytest

from train.memory.loop_copies import copied_before, passed_on
from train.memory.operation import Operation
from train.memory.postponed import postponed


#: A matmul, its weight gradient, and two more of the chain, of which the last makes a result.
FIRST = Operation("dot_general", (0, 1), (2,))
GRADIENT = Operation("dot_general", (2, 0), (3,))
SECOND = Operation("dot_general", (2, 1), (4,))
LAST = Operation("dot_general", (4, 1), (5,))
BARRIER = Operation("optimization_barrier", (3, 4), ())


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([FIRST, GRADIENT, SECOND, LAST], [FIRST, SECOND, LAST, GRADIENT]),
        # A barrier that reads it binds it.
        ([FIRST, GRADIENT, SECOND, BARRIER, LAST], [FIRST, SECOND, GRADIENT, BARRIER, LAST]),
        # What is made for it alone goes with it.
        (
            [FIRST, made := Operation("mul", (2,), (6,)), on := Operation("dot_general", (6, 0), (3,)), SECOND,
             LAST],
            [FIRST, SECOND, LAST, made, on],
        ),
        # A reduction runs with what makes its operand.
        (
            [FIRST, reduced := Operation("reduce_sum", (2,), (3,)), SECOND, LAST],
            [FIRST, reduced, SECOND, LAST],
        ),
        # The sum of a gradient begins half way to the barrier, and the gradient before it.
        (
            [FIRST, GRADIENT, total := Operation("reduce_scatter", (3,), (7,)), SECOND,
             third := Operation("dot_general", (4, 1), (8,)), fourth := Operation("dot_general", (8, 1), (9,)),
             bound := Operation("optimization_barrier", (7, 9), ()),
             on_nine := Operation("dot_general", (9, 1), (5,))],
            [FIRST, SECOND, GRADIENT, total, third, fourth, bound, on_nine],
        ),
    ],
)  # fmt: skip
def test_what_no_matmul_waits_for_runs_late(operations, expected):
    assert postponed(operations, {5}) == expected


#: Slices of stacked weights, cast and gathered, and the sum of their gradients.
SLICE, CAST = (
    Operation("dynamic_slice", (0, 1), (2,)),
    Operation("convert_element_type", (2,), (3,)),
)
GATHER = Operation("all_gather", (3,), (4,))


def test_stacked_weights_are_copied_if_slices_are_gathered():
    operations = [SLICE, CAST, GATHER]
    assert copied_before(operations, {3}, {0, 1}) == {0}
    assert copied_before(operations, {3}, {1}) == set()  # The loop passes them on.
    assert copied_before([Operation("mul", (0, 1), (3,)), GATHER], {3}, {0, 1}) == set()


def test_what_is_summed_at_the_end_of_an_iteration_is_passed_on():
    total, scaled = Operation("reduce_scatter", (2,), (3,)), Operation("mul", (3,), (4,))
    assert passed_on([SLICE, total, scaled], {4}, {"mul"}) == {2}
    assert passed_on([SLICE, total, scaled], {5}, {"mul"}) == set()
