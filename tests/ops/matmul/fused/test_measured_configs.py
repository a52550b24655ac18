"""The models that rank configurations, against what configurations took on 2 and 4 H200s.

Each file of tests/data/*_times.jsonl is for one op. Its first line names the fields of a
configuration; each further line is a problem with the measured configurations, as values of those
fields, and their median microseconds per call in a program of many.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pytest

from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_search import candidate_all_gather_configs
from collective_matmul.ops.matmul.fused.reduce_scatter_config import ReduceScatterProblem
from collective_matmul.ops.matmul.fused.reduce_scatter_search import (
    candidate_reduce_scatter_configs,
)

TIMES = Path(__file__).parents[3] / "data"
KERNELS: dict[str, tuple[Any, Any]] = {
    "all_gather": (AllGatherProblem, candidate_all_gather_configs),
    "reduce_scatter": (ReduceScatterProblem, candidate_reduce_scatter_configs),
}


def measured(kernel: str, devices: int) -> dict[Any, dict[Any, float]]:
    """The microseconds of each problem's configurations."""
    problem_type, candidates = KERNELS[kernel]
    head, *lines = map(json.loads, (TIMES / f"{kernel}_times.jsonl").read_text().splitlines())
    assert head["format"] == 1

    def values(config: Any) -> str:
        fields = config.to_json()
        fields |= fields.pop("tiling")
        return json.dumps([fields[name] for name in head["config"]])

    found = {}
    for line in lines:
        if line["problem"]["devices"] != devices:
            continue
        fields = {n: tuple(v) if isinstance(v, list) else v for n, v in line["problem"].items()}
        problem = problem_type(**fields)
        configs = {values(config): config for config in candidates(problem)}
        found[problem] = {configs[json.dumps(config)]: took for config, took in line["times"]}
    return found


def likeliest(configs: Iterable[Any]) -> Any:
    return min(configs, key=lambda config: config.predicted_microseconds())


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_likeliest_is_nearly_the_fastest(kernel: str, devices: int) -> None:
    """Several are as fast within what measurements vary. Few rows are predicted more coarsely."""
    problems = measured(kernel, devices)
    assert len(problems) >= 8 and all(len(times) > 5 for times in problems.values())
    regrets: dict[bool, list[float]] = {True: [], False: []}
    for problem, times in problems.items():
        regrets[devices * problem.m < 512].append(times[likeliest(times)] / min(times.values()))
    assert fmean(regrets[False]) < 1.02 and max(regrets[False]) < 1.1
    assert fmean(regrets[True]) < 1.07 and max(regrets[True]) < 1.15


def test_the_config_of_fewer_or_more_rows_loses_more_than_the_likeliest() -> None:
    """So problems that no table has get the likeliest, not that of the nearest rows in the table.

    Other numbers of rows divide into tiles and waves differently. The configurations of other rows
    are those with the same tiles, the likeliest of which is taken, where it was measured.
    """
    predicted, transferred = [], []
    for kernel, devices in itertools.product(KERNELS, (2, 4)):
        problems = measured(kernel, devices)
        for problem, times in problems.items():
            alike = [q for q in problems if q != problem and replace(q, m=problem.m) == problem]
            for nearest in neighbours(problem.m, alike):
                fastest = min(problems[nearest], key=problems[nearest].__getitem__)
                same = [config for config in times if tiles(config) == tiles(fastest)]
                if same:
                    least = min(times.values())
                    predicted.append(times[likeliest(times)] / least)
                    transferred.append(times[likeliest(same)] / least)
    assert len(predicted) > 60
    assert geometric_mean(predicted) < 1.025 and geometric_mean(transferred) > 1.05
    assert max(predicted) < 1.15 and max(transferred) > 1.4


def neighbours(rows: int, problems: Iterable[Any]) -> Iterator[Any]:
    """The nearest problem of fewer rows and that of more, if there are any."""
    for side in ([q for q in problems if q.m < rows], [q for q in problems if q.m > rows]):
        yield from sorted(side, key=lambda q: abs(math.log(q.m / rows)))[:1]


def tiles(config: Any) -> tuple[Any, ...]:
    tiling = config.tiling
    whose = getattr(config, "tiles_span_shards", None), getattr(config, "peers_per_pass", None)
    return tiling.tile_m, tiling.tile_n, tiling.cluster_dimension, *whose
