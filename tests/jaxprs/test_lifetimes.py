"""The bytes that are alive at one time, counted by hand."""

from __future__ import annotations

from collective_matmul.jaxprs.lifetimes import Execution, last_reads, peak

#: Bytes of arrays 0 to 3.
SIZES = (1, 10, 100, 1000)


def test_an_array_lives_until_it_is_read_for_the_last_time() -> None:
    executions = [Execution({0}), Execution({1}), Execution({2}), Execution({3})]
    last = last_reads([(1, [0]), (2, [0, 1]), (3, [2])])
    assert last == {0: 2, 1: 2, 2: 3}
    assert peak(executions, last, SIZES) == (1100, {2, 3})
    assert peak(executions[:3], last, SIZES) == (111, {0, 1, 2})


def test_what_is_never_read_lives_while_it_is_made() -> None:
    assert peak([Execution({3}), Execution({2})], {}, SIZES) == (1000, {3})


def test_results_replace_what_is_read_for_the_last_time() -> None:
    executions = [Execution({2}), Execution({0}), Execution({1}, replacing=10)]
    assert peak(executions, {2: 2, 1: 3}, SIZES) == (101, {0, 2})


def test_a_loop_has_arrays_inside() -> None:
    executions = [Execution({0}), Execution({1}), Execution(set(), inner=500)]
    assert peak(executions, {0: 2, 1: 2}, SIZES) == (511, {0, 1})
