"""Plans are launched as given, wrong ones and those that hang are left out, the fastest is kept."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from benchmarks import command_line
from benchmarks.communication import AXIS
from benchmarks.fused import plans
from benchmarks.fused.apart import HUNG, Said
from benchmarks.fused.cases import Case, Op, way_of
from benchmarks.fused.operands import Operands
from benchmarks.fused.plans import Outcome, Step, add, fastest
from benchmarks.fused.trials import (
    Bench,
    call_of,
    kind_of,
    plans_of,
    plans_to_try,
    start,
    text_of,
    way_by,
)
from collective_matmul.backends.fused import all_gather, reduce_scatter
from collective_matmul.data import Record
from collective_matmul.mosaic_gpu import device
from tests.conftest import MeshFactory

every_op = pytest.mark.parametrize("op", get_args(Op))


@every_op
def test_a_plan_is_launched_as_given(
    op: Op, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launched(Exception):
        """By which it ends before anything is lowered."""

    def launch(plan: Any, *_: Any) -> Any:
        raise Launched(plan)

    monkeypatch.setattr(device, "target", lambda: device.Target(132))
    for module in (all_gather, reduce_scatter):
        # Of JAX's version it is asked where the kernels are tested.
        monkeypatch.setattr(module, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(module, "_shared_launch", launch)
    case, mesh = Case(op, "8B", 64), make_mesh({AXIS: 4})
    call = call_of(case, 4)
    for plan in (plans_of(call)[0], plans_of(call)[-1]):
        sharded = jax.shard_map(
            way_by(plan, case),
            mesh=mesh,
            in_specs=case.specs[:2],
            out_specs=case.specs[2],
            check_vma=False,
        )
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.shapes]
        with pytest.raises(Launched) as launched:
            jax.eval_shape(sharded, *operands)
        assert launched.value.args == (plan,)


@every_op
def test_a_wrong_row_counts(
    op: Op, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the check of its plan alone; and rows that were never written."""
    case, mesh = Case(op, "tiny", 16), make_mesh({AXIS: 2})
    call, layers = call_of(case, 2), 3
    plans = plans_of(call)[:3]
    right = way_of("xla", op)

    def way(plan: Any, _: Case) -> Any:
        return [
            right,
            lambda x, w: (lambda y: y.at[2].set(y[3]))(right(x, w)),
            lambda x, w: right(x, w).at[2].set(jnp.nan),
        ][plans.index(plan)]

    monkeypatch.setattr("benchmarks.fused.trials.way_by", way)
    with ThreadPoolExecutor(2) as pool:
        operands = Operands(Case(op, "tiny", 32), layers, mesh, jnp.bfloat16)
        trials = start(case, call, plans, (), operands, pool)
        bench = Bench(trials)
        chains: list[Any] = [*trials.chains.values()]
        counts = [bench.wrong(chain.result()) for chain in chains]
    columns = case.shapes[1][1]
    # A row of each device, or of the columns that each device has.
    rows = 1 if op == "all_gather_matmul" else 2
    assert counts[0] == 0
    assert layers * rows * columns // 2 < counts[1] <= layers * rows * columns
    assert counts[2] == layers * rows * columns


def test_what_hangs_is_left_out_for_all_rows() -> None:
    few, many = (call_of(Case("all_gather_matmul", "8B", rows), 4) for rows in (256, 512))
    hung = plans_of(few)[0]
    alike = {
        plan
        for call in (few, many)
        for plan in plans_of(call)
        if kind_of(call, plan) == kind_of(few, hung)
    }
    assert hung in alike and alike & {*plans_of(many)}
    case, failed = Case("all_gather_matmul", "8B", 256), set()
    outcome = Outcome(case)
    step = Step(text_of(hung), kind_of(few, hung))
    assert HUNG in add(Said(case, step, HUNG), outcome, failed)
    assert outcome.wrong == {text_of(hung): HUNG} and not outcome.done
    for call in (few, many):
        tried = plans_to_try(call, len(plans_of(call)), failed)
        assert {*plans_of(call)} - {*tried} <= alike
        assert not alike & {*tried}


def test_what_is_wrong_is_no_reason_to_leave_out_others() -> None:
    case, failed = Case("all_gather_matmul", "8B", 256), set()
    outcome = Outcome(case)
    plan = text_of(plans_of(call_of(case, 4))[0])
    assert add(Said(case, Step(plan, "kind"), 0), outcome, failed) == ""
    assert outcome.wrong == {}
    assert add(Said(case, Step(plan, "kind"), 17), outcome, failed).endswith(": 17 wrong")
    assert outcome.wrong == {plan: "17 wrong"} and not failed
    add(Said(case, Step(), HUNG), outcome, failed)
    assert outcome.done
    table = fastest({"cases": [outcome.as_json]})
    assert f"| {case.name} |" in table and HUNG in table


def test_a_run_leaves_a_table(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The table holds shipped configurations and those found. Runs in another process."""
    arguments = (
        "plans --platform cpu --devices 2 --ops all_gather_matmul --models tiny --rows 16 32"
        " --candidates 2 --layers 2 --groups 1 --group-seconds 0.001 --lead-seconds 0.001"
        " --contenders xla --compile-threads 2 --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    found = json.loads((tmp_path / "report.json").read_text())["cases"]
    records = [Record(**outcome["record"]) for outcome in found]
    assert len(records) == 2
    table = plans.merged(plans.shipped_configs(), records)
    assert (tmp_path / "fused_configs.jsonl").read_text(encoding="utf-8") == table.to_text()
    for outcome in found:
        assert not outcome["wrong"] and not outcome["failure"]
        medians = {name: times[1] for name, times in outcome["times"].items() if name != "xla"}
        assert len(medians) == len(outcome["times"]) - 1 == 2
        assert outcome["best"] == min(medians, key=medians.__getitem__)
        assert outcome["record"]["config"] == json.loads(outcome["best"])
    assert "all_gather_matmul tiny M=16: predicted " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--contenders ring", "contenders: 'ring' is unknown; expected xla, ceiling"),
        ("--candidates 0", "candidates=0: expected at least 1"),
        ("--layers 0", "layers=0: expected at least 1"),
        ("--lead-seconds 0", "lead_seconds=0.0: expected more than 0"),
    ],
)
def test_settings_that_nothing_can_be_measured_with(
    option: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["plans", *option.split()])
    assert sentence in capsys.readouterr().err
