"""Which plans the fused kernels have, and which of them is chosen where some were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from collective_matmul.backends.fused import all_gather_config, config_search, reduce_scatter_config
from collective_matmul.backends.fused.config_search import Call, merged, tuned_plans

MULTIPROCESSORS = 132
GATHER = all_gather_config.Shapes(4, 1, 16, 4096, (3584,))
SCATTER = reduce_scatter_config.Shapes("scatter", 4, 1, 16, (3584,), 4096)
REDUCE = reduce_scatter_config.Shapes("one_shot", 4, 1, 64, (3584,), 4096)


def gathers(rows: int) -> Call:
    return Call("all_gather_matmul", replace(GATHER, rows=rows), MULTIPROCESSORS)


CALLS = {
    "gather": gathers(16),
    "scatter": Call("matmul_reduce_scatter", SCATTER, MULTIPROCESSORS),
    "reduce": Call("matmul_all_reduce", REDUCE, MULTIPROCESSORS),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def plans_of(call: Call) -> tuple[Any, ...]:
    plans: Any = {
        "all_gather_matmul": all_gather_config.candidates,
        "matmul_reduce_scatter": reduce_scatter_config.candidates,
        "matmul_all_reduce": reduce_scatter_config.all_reduce_candidates,
    }[call.op]
    return plans(call.shapes, call.multiprocessors)


def chosen(call: Call) -> Any:
    kernel = all_gather_config if call.op == "all_gather_matmul" else reduce_scatter_config
    return kernel.make_plan(call.shapes, call.multiprocessors)


class Table:
    """The table of measured plans, for one test."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch

    def holds(self, *lines: str) -> None:
        self.patch.setattr(config_search, "tuned_plans", lambda: merged(*lines))
        config_search._tuned.cache_clear()


@pytest.fixture
def tuned() -> Iterator[Table]:
    with pytest.MonkeyPatch.context() as patch:
        found = Table(patch)
        found.holds()
        yield found
    config_search._tuned.cache_clear()


@every_call
def test_the_likeliest_is_chosen_where_nothing_is_measured(call: Call, tuned: Table) -> None:
    plans = plans_of(call)
    assert chosen(call) == plans[0]
    assert len({json.dumps(plan.choices) for plan in plans}) == len(plans) > 20


@every_call
def test_what_is_measured_is_chosen(call: Call, tuned: Table) -> None:
    for plan in (plans_of(call)[7], plans_of(call)[-1]):
        tuned.holds(call.line(plan, 12.3))
        assert chosen(call) == plan


def test_plans_are_told_apart_by_who_gets_a_shard_together(tuned: Table) -> None:
    call = CALLS["gather"]
    first = plans_of(call)[0]
    alike = [plan for plan in plans_of(call) if replace(plan, passes=first.passes) == first]
    assert {plan.passes for plan in alike} == {(1, 1, 1), (3,)}
    for plan in alike:
        tuned.holds(call.line(plan, 12.3))
        assert chosen(call) == plan


@every_call
def test_other_calls_are_not_meant(call: Call, tuned: Table) -> None:
    """Neither other widths, nor other GPUs, nor more rows."""
    last = plans_of(call)[-1]
    tuned.holds(call.line(last, 12.3))
    for other in (
        replace(call, shapes=replace(call.shapes, devices=2)),
        replace(call, shapes=replace(call.shapes, w_contracted=2)),
        replace(call, multiprocessors=114),
        replace(call, shapes=replace(call.shapes, rows=2 * call.shapes.rows)),
    ):
        assert chosen(other) == plans_of(other)[0]


def test_sums_leave_in_wide_strips_where_the_widths_allow() -> None:
    """Narrow ones were measured to be slower than tiles of fewer waves make up for."""
    shapes = reduce_scatter_config.Shapes("scatter", 2, 1, 2048, (7168,), 8192)
    assert reduce_scatter_config.candidates(shapes)[0].tiles.strip_columns == 64


def test_an_all_reduce_goes_the_way_that_suits_its_size(tuned: Table) -> None:
    kinds = [
        chosen(replace(CALLS["reduce"], shapes=replace(REDUCE, rows=rows))) for rows in (16, 4096)
    ]
    assert [plan.shapes.kind for plan in kinds] == ["one_shot", "two_step"]
    assert {plan.shapes.kind for plan in plans_of(CALLS["reduce"])[:8]} == {"one_shot", "two_step"}


def test_the_last_line_of_a_call_counts() -> None:
    call = CALLS["gather"]
    first, second, *_ = plans_of(call)
    lines = [call.line(plan, 5.0) for plan in (first, second)]
    other = gathers(32).line(first, 7.0)
    assert merged("\n".join([lines[0], other]), lines[1]) == f"{lines[1]}\n{other}\n"


def test_the_shipped_plans_are_all_chosen() -> None:
    """So each can be done, and differs from the others in its call."""
    assert merged(tuned_plans()) == tuned_plans()
    for line in map(json.loads, tuned_plans().splitlines()):
        sizes = {n: tuple(v) if isinstance(v, list) else v for n, v in line["shapes"].items()}
        gathers = line["op"] == "all_gather_matmul"
        kind: Any = all_gather_config.Shapes if gathers else reduce_scatter_config.Shapes
        call = Call(line["op"], kind(**sizes), line["multiprocessors"])
        assert chosen(call).choices == line["plan"]
        microseconds = line["microseconds"]
        assert 0 < microseconds < math.inf
