"""The benchmark of rings between processes: what it times computes the same."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import AXIS, PlainJax
from benchmarks.processes.process_rings import (
    CANDIDATES,
    ProcessRings,
    Ring,
    ratios,
    run,
)
from tests.conftest import MeshFactory


def test_rings_compute_what_plain_jax_does(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({AXIS: 2})
    draw = np.random.default_rng(0).integers

    def outcome(communication: PlainJax) -> list[np.ndarray]:
        def both(x, w, v):
            (y,) = communication.all_gather_matmul(x, (w,))
            return y, communication.matmul_reduce_scatter(y, v)

        rows, columns = P(AXIS), P(None, AXIS)
        specs = {"in_specs": (rows, columns, rows), "out_specs": (columns, rows)}
        return list(map(np.asarray, jax.jit(jax.shard_map(both, mesh=mesh, **specs))(*arrays)))

    arrays = [jnp.asarray(draw(-4, 4, shape), jnp.float32) for shape in ((8, 4), (4, 6), (6, 4))]
    expected = outcome(PlainJax())
    for actual, plain in zip(outcome(Ring()), expected, strict=True):
        np.testing.assert_array_equal(actual, plain)


def test_times_are_shown_over_those_of_the_computation() -> None:
    times = {candidate.name: [0.003, 0.001, 0.002] for candidate, _ in CANDIDATES}
    times["ring"] = [0.0021] * 3
    del times["fused"], times["one_shot"]
    case = {"name": "M 64", "times": times, "taken": ["xla"], "failed": {"fused": "no GPU"}}
    another = {"name": "M 24", "times": {**times, "one_shot": [0.004]}}
    lines = ratios({"cases": [case, another]}).splitlines()
    assert "| ring | 1.050 | 1.050 |" in lines
    assert "| one_shot | – | 2.000 |" in lines
    assert not any(line.startswith("| fused") for line in lines)
    assert "| ms of a layer, compute_only | 2.000 | 2.000 |" in lines
    assert "| auto takes | xla |  |" in lines
    assert lines[-1] == "fused at M 64: no GPU"


@pytest.mark.exhaustive
def test_two_processes_are_timed(tmp_path: Path) -> None:
    small = {"shape": "tiny", "rows": (64,), "layers": 1, "dtype": "float32"}
    settings = ProcessRings(platform="cpu", groups=1, group_seconds=0.001, output=tmp_path, **small)
    (case,) = run(settings).content["cases"]
    assert set(case["failed"]) == {"fused", "one_shot"}
    assert set(case["times"]) == {candidate.name for candidate, _ in CANDIDATES} - {*case["failed"]}
    assert case["taken"] == ["xla"]
    assert "library_ring" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "9B"}, "^shape: '9B' is unknown; expected 70B, "),
        (
            {"candidates": ("fsued",)},
            "^candidates: 'fsued' is unknown; expected compute_only, plain",
        ),
        ({"layers": 0}, "^layers=0: "),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(ProcessRings(platform="cpu", output=tmp_path, **settings))
