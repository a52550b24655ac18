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
#: What is made for a gradient alone, and the gradient.
MADE, OF_MADE = Operation("mul", (2,), (6,)), Operation("dot_general", (6, 0), (3,))
REDUCED = Operation("reduce_sum", (2,), (3,))
#: A sum of the gradient, matmuls that follow, and a barrier between them and the last one.
SUMMED = Operation("reduce_scatter", (3,), (7,))
MORE = Operation("dot_general", (4, 1), (8,)), Operation("dot_general", (8, 1), (9,))
BOUND, END = Operation("optimization_barrier", (7, 9), ()), Operation("dot_general", (9, 1), (5,))


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([FIRST, GRADIENT, SECOND, LAST], [FIRST, SECOND, LAST, GRADIENT]),
        # A barrier that reads it binds it.
        ([FIRST, GRADIENT, SECOND, BARRIER, LAST], [FIRST, SECOND, GRADIENT, BARRIER, LAST]),
        # What is made for it alone goes with it.
        (
            [FIRST, MADE, OF_MADE, SECOND, LAST],
            [FIRST, SECOND, LAST, MADE, OF_MADE],
        ),
        # A reduction runs with what makes its operand.
        ([FIRST, REDUCED, SECOND, LAST], [FIRST, REDUCED, SECOND, LAST]),
        # The sum of a gradient begins half way to the barrier, and the gradient before it.
        (
            [FIRST, GRADIENT, SUMMED, SECOND, *MORE, BOUND, END],
            [FIRST, SECOND, GRADIENT, SUMMED, *MORE, BOUND, END],
        ),
    ],
)
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
