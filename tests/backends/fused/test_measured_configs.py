"""The models that choose plans, against the reports of what plans took on 2 and 4 H200."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from collective_matmul.backends.fused import all_gather_config, reduce_scatter_config

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
# By devices, the newest first: a case counts as it was measured last.
MEASURED = {
    2: ("2026-11-22-fused-boxes-2-h200/plans-*.json", "2026-11-22-fused-plans-2-h200/*.json"),
    4: ("2026-11-22-fused-plans-4-h200/*.json",),
}
KERNELS: dict[str, Any] = {
    "all_gather_matmul": all_gather_config,
    "matmul_reduce_scatter": reduce_scatter_config,
}


def measured(op: str, devices: int) -> Iterator[tuple[int, list[tuple[float, float]]]]:
    """Of each case, its rows, and what plans are predicted to take and took, in microseconds.

    The likeliest come first.
    """
    kernel = KERNELS[op]
    cases = itertools.chain.from_iterable(
        json.loads(path.read_text())["cases"]
        for pattern in MEASURED[devices]
        for path in sorted(REPORTS.glob(pattern))
    )
    newest: dict[str, Any] = {}
    for case in cases:
        if case["case"]["op"] == op and case["best"]:
            newest.setdefault(case["name"], case)
    for case in newest.values():
        sizes = json.loads(case["line"])["shapes"].items()
        problem = kernel.Shapes(**{n: tuple(v) if isinstance(v, list) else v for n, v in sizes})
        took = {name: quartiles[1] for name, quartiles in case["times"].items()}
        boxed = '"box"' in case["line"]
        yield (
            case["case"]["rows"],
            [
                (kernel.predicted_plan_microseconds(config), took[name])
                for config in kernel.candidates(problem)
                if (name := name_of(config, boxed)) in took
            ],
        )


def name_of(config: Any, boxed: bool) -> str:
    """In the reports.

    Before boxes were a choice, kernels sent shards that join to all peers at once, others to each.
    """
    choices = config.to_json()
    if not boxed:
        choices.pop("box", None)
        if choices.get("joins") or max(choices.get("passes", [1])) == 1:
            choices.pop("passes", None)
    return json.dumps(choices)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("op", KERNELS)
def test_the_likeliest_is_nearly_the_fastest(op: str, devices: int) -> None:
    """Several are as fast within what measurements vary. Few rows are predicted more coarsely."""
    cases = list(measured(op, devices))
    assert len(cases) >= 8 and all(len(configs) > 5 for _, configs in cases)
    regrets: dict[bool, list[float]] = {True: [], False: []}
    for rows, configs in cases:
        _, took = min(configs, key=lambda config: config[0])
        regrets[rows < 512].append(took / min(took for _, took in configs))
    assert fmean(regrets[False]) < 1.02 and max(regrets[False]) < 1.1
    assert fmean(regrets[True]) < 1.07 and max(regrets[True]) < 1.15
