"""Which configurations the fused kernels have, and which one is chosen where some were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from collective_matmul import data
from collective_matmul.mosaic_gpu import device
from collective_matmul.ops.matmul.fused import config_search
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_search import (
    candidate_all_gather_configs,
    choose_all_gather_config,
)
from collective_matmul.ops.matmul.fused.backend import Fused
from collective_matmul.ops.matmul.fused.config_search import KernelCall, shipped_configs
from collective_matmul.ops.matmul.fused.reduce_scatter_config import ReduceScatterProblem
from collective_matmul.ops.matmul.fused.reduce_scatter_search import (
    candidate_all_reduce_configs,
    candidate_reduce_scatter_configs,
    choose_reduce_scatter_config,
)
from collective_matmul.ops.matmul.request import Op
from tests.dispatch.sites import site_of

MULTIPROCESSORS = 132
GATHER = AllGatherProblem(4, 1, 16, 4096, (3584,))
SCATTER = ReduceScatterProblem("scatter", 4, 1, 16, (3584,), 4096)
REDUCE = ReduceScatterProblem("one_shot", 4, 1, 64, (3584,), 4096)
EMPTY = data.MeasuredData("fused_configs", "NVIDIA H200", [])


def gathers(rows: int) -> KernelCall:
    return KernelCall("all_gather_matmul", replace(GATHER, m=rows), MULTIPROCESSORS)


CALLS = {
    "gather": gathers(16),
    "scatter": KernelCall("matmul_reduce_scatter", SCATTER, MULTIPROCESSORS),
    "reduce": KernelCall("matmul_all_reduce", REDUCE, MULTIPROCESSORS),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def configs_of(call: KernelCall) -> tuple[Any, ...]:
    candidates: Any = {
        "all_gather_matmul": candidate_all_gather_configs,
        "matmul_reduce_scatter": candidate_reduce_scatter_configs,
        "matmul_all_reduce": candidate_all_reduce_configs,
    }[call.op]
    return candidates(call.problem, call.multiprocessors)


def chosen(call: KernelCall) -> Any:
    gathers = call.op == "all_gather_matmul"
    choose: Any = choose_all_gather_config if gathers else choose_reduce_scatter_config
    return choose(call.problem, call.multiprocessors)


class Table:
    """The table of measured configurations, for one test."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch

    def holds(self, *records: data.Record) -> None:
        self.patch.setattr(config_search, "shipped_configs", lambda: EMPTY.updated(records))
        config_search._measured_configs.cache_clear()


@pytest.fixture
def table() -> Iterator[Table]:
    with pytest.MonkeyPatch.context() as patch:
        found = Table(patch)
        found.holds()
        yield found
    config_search._measured_configs.cache_clear()


@every_call
def test_the_likeliest_is_chosen_where_nothing_is_measured(call: KernelCall, table: Table) -> None:
    configs = configs_of(call)
    assert chosen(call) == configs[0]
    assert len({json.dumps(config.to_json()) for config in configs}) == len(configs) > 20


@every_call
def test_what_is_measured_is_chosen(call: KernelCall, table: Table) -> None:
    for config in (configs_of(call)[7], configs_of(call)[-1]):
        table.holds(call.record(config, 12.3))
        assert chosen(call) == config


def test_configs_are_told_apart_by_which_peers_get_a_shard_together(table: Table) -> None:
    call = CALLS["gather"]
    first = configs_of(call)[0]
    alike = [
        config
        for config in configs_of(call)
        if replace(config, peers_per_pass=first.peers_per_pass) == first
    ]
    assert {config.peers_per_pass for config in alike} == {(1, 1, 1), (3,)}
    for config in alike:
        table.holds(call.record(config, 12.3))
        assert chosen(call) == config


@every_call
def test_a_record_is_for_its_own_call_only(call: KernelCall, table: Table) -> None:
    """Neither for other widths, nor for other GPUs, nor for more rows."""
    last = configs_of(call)[-1]
    table.holds(call.record(last, 12.3))
    for other in (
        replace(call, problem=replace(call.problem, devices=2)),
        replace(call, problem=replace(call.problem, w_contracted_axis=2)),
        replace(call, multiprocessors=114),
        replace(call, problem=replace(call.problem, m=2 * call.problem.m)),
    ):
        assert chosen(other) == configs_of(other)[0]


def test_sums_leave_in_wide_epilogue_tiles_if_the_widths_allow() -> None:
    """Narrow ones were measured to be slower than tiles of fewer waves make up for."""
    problem = ReduceScatterProblem("scatter", 2, 1, 2048, (7168,), 8192)
    assert candidate_reduce_scatter_configs(problem)[0].tiling.epilogue_tile_n == 64


def test_an_all_reduce_is_done_as_suits_its_size(table: Table) -> None:
    kinds = [
        chosen(replace(CALLS["reduce"], problem=replace(REDUCE, m=rows))) for rows in (16, 4096)
    ]
    assert [config.problem.kind for config in kinds] == ["one_shot", "two_shot"]
    likeliest = configs_of(CALLS["reduce"])[:8]
    assert {config.problem.kind for config in likeliest} == {"one_shot", "two_shot"}


def test_the_last_record_of_a_problem_counts() -> None:
    call = CALLS["gather"]
    first, second, *_ = configs_of(call)
    old, new = (call.record(config, 5.0) for config in (first, second))
    other = gathers(32).record(first, 7.0)
    assert EMPTY.updated([other, old]).updated([new]).records == [other, new]


def call_of(record: data.Record) -> KernelCall:
    fields: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in record.problem.items()
    }
    op, multiprocessors = fields.pop("op"), fields.pop("multiprocessors")
    kind: Any = AllGatherProblem if op == "all_gather_matmul" else ReduceScatterProblem
    return KernelCall(op, kind(**fields), multiprocessors)


@pytest.mark.parametrize(
    ("op", "rows", "m"),
    [
        ("all_gather_matmul", 36, 9),
        ("matmul_reduce_scatter", 36, 9),
        ("matmul_all_reduce", 4096, 4096),
    ],
)
def test_a_measured_site_gets_its_config(
    op: Op, rows: int, m: int, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the kernel pads the rows, or an all-reduce takes two shots."""
    monkeypatch.setattr(device, "target", lambda: device.Target(MULTIPROCESSORS))
    site = site_of(op, rows, 4096, 4096)
    backend, configs = Fused(), cast(Any, Fused().configurations(site))
    for config in configs[:3]:
        record = backend.configuration_record(site, config, 12.3)
        assert record.problem["m"] == m != config.problem.m
        table.holds(record)
        assert chosen(call_of(record)) == config


def test_the_shipped_configs_are_all_chosen() -> None:
    """So each can run, and differs from the others for its call."""
    table = shipped_configs()
    assert table.updated([]) == table and len(table.records) > 60
    for record in table.records:
        call = call_of(record)
        assert call.to_json() == record.problem
        assert chosen(call).to_json() == record.config
        assert 0 < record.microseconds["fused"] < math.inf
