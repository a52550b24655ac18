"""The benchmark of processes: what it times computes what plain JAX does in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import AXIS, CollectiveMatmul, PlainJax
from benchmarks.processes import processes
from benchmarks.processes.processes import Kind, Processes, ratios, run, sample, wrong
from tests.conftest import MeshFactory

#: A rehearsal.
SMALL: dict[str, Any] = {
    **{"platform": "cpu", "dtype": "float32", "groups": 1, "group_seconds": 0.001, "rounds": 2},
    **{"shape": "tiny", "rows": (64,), "preset": "debug", "sequence_length": 32, "layers": 1},
}
DIRECTIONS = ("forward", "forward_backward")


def _swapped(self: CollectiveMatmul, rows: jax.Array, ws: Any) -> tuple[jax.Array, ...]:
    """The op, as if devices received what was meant for others: each gets all rows, misplaced."""
    return PlainJax().all_gather_matmul(lax.ppermute(rows, AXIS, [(0, 1), (1, 0)]), ws)


def work_wrongly(settings: Processes, kind: Kind) -> Iterator[Any]:
    """Works as the benchmark does; with several processes the library gathers wrongly."""
    if jax.process_count() > 1:
        CollectiveMatmul.all_gather_matmul = _swapped
    return processes.work(settings, kind)


@pytest.mark.exhaustive
def test_stacks_are_timed_unless_their_numbers_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "work", work_wrongly)
    report = run(Processes(**SMALL, output=tmp_path))
    names = [f"tiny M=64 {d}, {p}" for p in ("1 process", "2 processes") for d in DIRECTIONS]
    assert [case["name"] for case in report.content["cases"]] == names
    for case in report.content["cases"]:
        results = case["candidates"]
        assert "Hopper GPUs only" in results.pop("fused")["failure"]
        if case["name"].endswith("2 processes"):
            failure = results.pop("auto")
            assert failure["failure"].startswith("wrong numbers: result") and not failure["samples"]
        assert not any(result["failure"] for result in results.values())
        assert {len(result["samples"]) for result in results.values()} == {2}
    assert "off plain JAX in one process" in (tmp_path / "report.md").read_text()


@pytest.mark.exhaustive
def test_steps_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    report = run(Processes(**SMALL, kinds=("tensor", "fsdp"), output=tmp_path))
    one, two, *sharded = (case["candidates"] for case in report.content["cases"])
    for results in (one, two, *sharded):
        failures = {name: result["failure"] for name, result in results.items()}
        assert failures == {"baseline": None, "auto": None}
        assert {len(result["samples"]) for result in results.values()} == {2}
    for name, result in one.items():
        assert two[name]["gradient_norm"] == pytest.approx(result["gradient_norm"], rel=1e-3)


def test_jobs_end_if_one_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def job(*arguments: Any) -> Any:
        return mock.Mock(end=lambda: ended.append(arguments[-2]))

    def compiled(*arguments: Any) -> Any:
        if next(numbers):
            raise KeyboardInterrupt
        return {}

    numbers = iter((0, 1))
    monkeypatch.setattr(processes, "ResidentJob", job)
    monkeypatch.setattr(processes, "_compiled", compiled)
    with pytest.raises(KeyboardInterrupt):
        run(Processes(**SMALL, output=tmp_path))
    assert ended == [1, 2]


def test_numbers_of_every_device_are_compared(make_mesh: MeshFactory) -> None:
    sharding = NamedSharding(make_mesh({AXIS: 2}), P(AXIS))
    x = np.random.default_rng(0).standard_normal((600, 70)).astype(np.float32)
    placed = {"y": jax.device_put(x, sharding), "loss": jax.numpy.float32(2.0)}
    right = sample(placed)
    y = right["['y']", 1]
    np.testing.assert_array_equal(y, x[300::5])
    assert wrong(right, right) is None
    assert wrong(right | {("['y']", 1): y * 1.01}, right) is None
    for spoilt in (y[::-1], np.where(y == y[3, 5], math.nan, y)):
        message = wrong(right | {("['y']", 1): spoilt}, right)
        assert message is not None and message.startswith("wrong numbers: result['y'] on device 1 ")
    loss = ("['loss']", 0)
    assert str(wrong(right | {loss: right[loss] * np.float32(1.01)}, right)) == (
        "wrong numbers: result['loss'] on device 0 is 1.0% off plain JAX in one process"
    )
    assert "no results" in str(wrong(right, None))


def test_programs_that_communicate_in_another_order_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(name: str) -> Any:
        program = SimpleNamespace(candidate=SimpleNamespace(name=name))
        text = SimpleNamespace(as_text=lambda: " = f32[2] all-reduce(x)")
        return SimpleNamespace(candidate=name, programs=(program,), compiled=text)

    case: Any = SimpleNamespace(executables=[compiled("auto"), compiled("fused")], failures={})
    others = {"auto": ["all-gather f32[4]"], "fused": ["all-reduce f32[2]"]}
    monkeypatch.setattr(processes, "exchange", lambda own: [own, others])
    processes._leave_out_different(case)
    assert [executable.candidate for executable in case.executables] == ["fused"]
    assert case.failures == {"auto": "XLA has not compiled one program for all processes"}


def test_times_are_shown_over_those_of_the_computation_in_the_same_round() -> None:
    alone, plain = [1.0, 1.0, 2.0, 2.0, 1.0, 1.0], [1.5, 1.5, 3.2, 3.2, 1.4, 1.4]
    timed = {"baseline": plain, "auto": [], "compute_only": alone, "torch": [1.2, 1.2]}
    stack = {"name": "M", "candidates": {n: {"samples": samples} for n, samples in timed.items()}}
    step = {"name": "step", "candidates": {"baseline": {"samples": plain}}}
    lines = ratios({"settings": {"groups": 2}, "cases": [stack, step]}).splitlines()
    ratio, one = "1.500 [1.400, 1.600]", "1.000 [1.000, 1.000]"
    assert lines[-2:] == [
        f"| M | {ratio} |  | {one} | 1.200 [1.200, 1.200] |",
        f"| step | {one} |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 1000, "platform": "gpu"}, r"^devices=1000: there are \d+; ask for fewer$"),
        ({"devices": 1}, "^devices=1: expected at least 2"),
        ({"rounds": 0}, "^rounds=0: expected at least 1"),
        ({"shape": "9B"}, "^shape: '9B' is unknown; expected 70B, "),
        ({"rows": (25,)}, "^rows=25 of '8B M=25 forward': not divisible by 2 devices"),
        ({"candidates": ("fsued",)}, "^candidates: 'fsued' is unknown; expected baseline, "),
        (
            {"kinds": ("tensor",), "candidates": ("compute_only",)},
            "^candidates: 'compute_only' is unknown",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(Processes(**{"platform": "cpu", "output": tmp_path, **settings}))
