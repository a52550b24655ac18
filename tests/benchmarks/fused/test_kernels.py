"""The checks of the fused kernels find what is wrong, and a step that hangs ends."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from benchmarks import command_line
from benchmarks.communication import AXIS
from benchmarks.fused import kernels
from benchmarks.fused.apart import HUNG, Said, listen, run_apart
from benchmarks.fused.cases import Case, Checks, Op, chain, way_of
from tests.conftest import MeshFactory

every_op = pytest.mark.parametrize("op", get_args(Op))


@every_op
def test_what_is_right_passes(op: Op, make_mesh: MeshFactory) -> None:
    checks = Checks(Case(op, "tiny", 16), make_mesh({AXIS: 4}), jnp.bfloat16, turns=2)
    for contender in ("xla", "ring"):
        assert checks.exact(way_of(contender, op))() == 0
    assert checks.repeated(way_of("xla", op))() == 0


def test_one_row_too_early_fails(make_mesh: MeshFactory) -> None:
    """As if it still held what another shard left there."""
    case = Case("all_gather_matmul", "tiny", 16)
    right = way_of("xla", case.op)

    def way(x: jax.Array, w: jax.Array) -> jax.Array:
        y = right(x, w)
        return y.at[3].set(y[4])

    checks = Checks(case, make_mesh({AXIS: 4}), jnp.bfloat16, turns=2)
    assert checks.exact(way)() > 100


@every_op
def test_the_ceiling_does_the_same_work(op: Op, make_mesh: MeshFactory) -> None:
    mesh, case = make_mesh({AXIS: 4}), Case(op, "tiny", 16)
    flops = [
        chain(case, contender, mesh, jnp.bfloat16, 2).cost_analysis()["flops"]
        for contender in ("xla", "ceiling")
    ]
    assert flops[1] == pytest.approx(flops[0], rel=0.02)


def test_a_step_that_hangs_is_noted() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    case = Case("all_gather_matmul", "tiny", 16)
    outcome = kernels.Outcome(case)
    sender.send(Said(case, ("checks", "exact")))
    sender.send(Said(case, ("checks", "exact"), 0))
    sender.send(Said(case, ("checks", "delayed")))
    listen(receiver, 0.01, lambda said: kernels.add(said, outcome))
    assert outcome.checks == {"exact": 0}
    assert outcome.hung == "delayed"
    table = kernels.checks_and_times({"cases": [outcome.as_json]})
    assert "delayed hung or died" in table


def test_the_rest_is_done_by_another_process(capfd: pytest.CaptureFixture) -> None:
    """One that dies in its first step, and one after it that says what came out."""
    found: list[Said] = []
    given = iter([("dies",), ("ends",), None])
    run_apart(_dies_or_ends, lambda: next(given), 60.0, found.append)
    assert found == [Said("dies", "step", HUNG), Said("ends", "step", 1)]


def test_nothing_comes_of_a_process(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="before the first of its steps"):
        run_apart(_ends, lambda: (), 60.0, lambda said: pytest.fail(str(said)))


def _ends(connection: Connection) -> None:
    del connection


def test_settings_are_refused_here(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="devices=99: there are 8"):
        run_apart(_refuses, lambda: (), 60.0, lambda said: pytest.fail(str(said)))


def _refuses(connection: Connection) -> None:
    raise ValueError("devices=99: there are 8")


def _dies_or_ends(what: str, connection: Connection) -> None:
    connection.send(Said(what, "step"))
    if what == "dies":
        os._exit(1)
    connection.send(Said(what, "step", 1))


def test_a_run_leaves_a_report(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Its cases ran in a process of their own."""
    arguments = (
        "fused --platform cpu --devices 2 --models tiny --rows 16 --repeats 0 --layers 1"
        " --groups 1 --group-seconds 0.001 --contenders bulk ring --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    content = json.loads((tmp_path / "report.json").read_text())
    (case,) = content["cases"]
    assert not case["hung"] and set(case["times"]) == {"xla", "ring"}
    assert content["environment"]["versions"]["jax"] == jax.__version__
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# fused: 2 × cpu\n") and "-m benchmarks" in text
    *_, row = text.splitlines()
    assert row.startswith("| all_gather_matmul tiny M=16 |")
    assert row in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("fused --step-seconds 0", "step_seconds=0.0: expected more than 0"),
        ("fused --repeats -1", "repeats=-1: expected at least 0"),
        ("tiles --output tiles.jsonl --part 1 1", "part=1 1: expected a number, and a larger one"),
        (
            "tiles --output nowhere/tiles.jsonl",
            "output=nowhere/tiles.jsonl: there is no folder nowhere",
        ),
        ("tiles --output tiles.jsonl", "the kernel runs on Hopper GPUs; run this on one"),
    ],
)
def test_settings_that_nothing_can_be_measured_with(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(arguments.split())
    assert sentence in capsys.readouterr().err


def test_an_unknown_contender_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["fused", "--contenders", "xla", "fast"])
    assert "contenders: 'fast' is unknown; expected bulk, " in capsys.readouterr().err


def test_cases_are_compiled_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, before any of them is timed; who fails is told with the reason."""
    compiled: list[tuple[int, str]] = []

    def chain(case: Case, contender: str, *_: Any) -> str:
        compiled.append((case.rows, contender))
        if contender == "ring":
            raise ValueError("no ring\nat all")
        return contender

    monkeypatch.setattr(kernels, "chain", chain)
    settings = kernels.Fused(contenders=("xla", "ring"))
    cases = [Case("all_gather_matmul", "tiny", rows) for rows in range(2, 14, 2)]
    programs = kernels.Programs(cases, None, settings)  # type: ignore[arg-type]
    # One was done by a process that has ended.
    for number, case in enumerate(cases[1:]):
        found = programs.take(case)
        assert list(found.values()) == ["xla", "ValueError: no ring"]
        assert len(compiled) == 2 * (4 if number < 4 else 5)
    assert len(set(compiled)) == len(compiled)
