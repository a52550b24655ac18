"""The models that choose plans, against the reports of what plans took on 2 and 4 H200."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from collective_matmul.kernels import gather_plan, scatter_plan

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
KERNELS: dict[str, Any] = {
    "all_gather_matmul": gather_plan,
    "matmul_reduce_scatter": scatter_plan,
}


def measured(op: str, devices: int) -> Iterator[list[tuple[float, float]]]:
    """Of each case, what plans are predicted to take and what they took, in microseconds.

    The likeliest come first.
    """
    kernel = KERNELS[op]
    for path in (REPORTS / f"2026-11-22-fused-plans-{devices}-h200").glob("*.json"):
        for case in json.loads(path.read_text())["cases"]:
            if case["case"]["op"] != op or not case["best"]:
                continue
            sizes = json.loads(case["line"])["shapes"].items()
            shapes = kernel.Shapes(**{n: tuple(v) if isinstance(v, list) else v for n, v in sizes})
            took = {name: quartiles[1] for name, quartiles in case["times"].items()}
            yield [
                (kernel.predicted_plan_microseconds(plan), took[name])
                for plan in kernel.candidates(shapes)
                if (name := name_of(plan)) in took
            ]


def name_of(plan: Any) -> str:
    """In the reports, whose kernels sent shards that join to all peers at once, others to each."""
    choices = plan.choices
    if choices.get("joins") or max(choices.get("passes", [1])) == 1:
        choices.pop("passes", None)
    return json.dumps(choices)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("op", KERNELS)
def test_the_likeliest_is_nearly_the_fastest(op: str, devices: int) -> None:
    """Several are as fast within what measurements vary."""
    cases = list(measured(op, devices))
    assert len(cases) >= 8 and all(len(plans) > 5 for plans in cases)
    likeliest = [min(plans, key=lambda plan: plan[0]) for plans in cases]
    fastest = [min(took for _, took in plans) for plans in cases]
    regrets = [took / least for (_, took), least in zip(likeliest, fastest, strict=True)]
    assert fmean(regrets) < 1.02
    assert max(regrets) < 1.1
