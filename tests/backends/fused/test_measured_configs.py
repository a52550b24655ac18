"""The models that rank configurations, against what configurations took on 2 and 4 H200s.

Each file of tests/data/*_times.jsonl is for one op. Its first line names the fields of a
configuration; each further line is a problem with the measured configurations, as values of those
fields, and their median microseconds per call in a program of many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from collective_matmul.backends.fused.all_gather_config import AllGatherProblem
from collective_matmul.backends.fused.all_gather_search import candidate_all_gather_configs
from collective_matmul.backends.fused.reduce_scatter_config import ReduceScatterProblem
from collective_matmul.backends.fused.reduce_scatter_search import candidate_reduce_scatter_configs

TIMES = Path(__file__).parents[2] / "data"
KERNELS: dict[str, tuple[Any, Any]] = {
    "all_gather": (AllGatherProblem, candidate_all_gather_configs),
    "reduce_scatter": (ReduceScatterProblem, candidate_reduce_scatter_configs),
}


def measured(kernel: str, devices: int) -> Iterator[tuple[int, list[tuple[float, float]]]]:
    """For each problem, its rows, and its configurations' predicted and measured microseconds."""
    problem_type, candidates = KERNELS[kernel]
    head, *lines = map(json.loads, (TIMES / f"{kernel}_times.jsonl").read_text().splitlines())
    assert head["format"] == 1

    def values(config: Any) -> str:
        fields = config.to_json()
        fields |= fields.pop("tiling")
        return json.dumps([fields[name] for name in head["config"]])

    for line in lines:
        if line["problem"]["devices"] != devices:
            continue
        fields = {n: tuple(v) if isinstance(v, list) else v for n, v in line["problem"].items()}
        problem = problem_type(**fields)
        configs = {values(config): config for config in candidates(problem)}
        yield (
            devices * problem.m,
            [
                (configs[json.dumps(config)].predicted_microseconds(), microseconds)
                for config, microseconds in line["times"]
            ],
        )


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_likeliest_is_nearly_the_fastest(kernel: str, devices: int) -> None:
    """Several are as fast within what measurements vary. Few rows are predicted more coarsely."""
    problems = list(measured(kernel, devices))
    assert len(problems) >= 8 and all(len(times) > 5 for _, times in problems)
    regrets: dict[bool, list[float]] = {True: [], False: []}
    for rows, times in problems:
        _, took = min(times, key=lambda time: time[0])
        regrets[rows < 512].append(took / min(took for _, took in times))
    assert fmean(regrets[False]) < 1.02 and max(regrets[False]) < 1.1
    assert fmean(regrets[True]) < 1.07 and max(regrets[True]) < 1.15
