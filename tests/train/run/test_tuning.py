"""`--tune` measures what a step of the run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collective_matmul import explain
from train.run import tuning
from train.run.command_line import main

TINY = [
    "--tune", "--sequence-length", "16", "--batch-size", "8", "--mesh.tensor", "2",
    "--model.num-layers", "1", "--model.features", "32", "--model.hidden-features", "32",
    "--model.num-heads", "8", "--model.num-key-value-heads", "8", "--model.head-dim", "4",
]  # fmt: skip


def test_the_step_of_the_run_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    measured: list[Any] = []

    def tune(step: Any, *arguments: Any, path: Any) -> None:
        decisions = explain(step, peer_kernels=False)(*arguments).decisions
        measured.append((path, {(each.site.op, each.site.direction) for each in decisions}))

    monkeypatch.setattr(tuning, "tune", tune)
    table = str(tmp_path / "table.jsonl")
    main([*TINY, "--tune-table", table])
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    assert measured == [(table, {(op, way) for op in ops for way in ("forward", "backward")})]
    assert "on data=4 × fsdp=1 × tensor=2: the collective matmuls" in capsys.readouterr().out


def test_a_table_of_cpus_needs_a_name(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(TINY)
    assert "tune: JAX finds no GPU, only cpu devices" in capsys.readouterr().err
