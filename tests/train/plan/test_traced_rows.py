"""Rows of a plan near the limit are traced before it says that they fit."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.plan.plans import H100, config
from train.memory.device_memory import GPUS, MARGIN
from train.plan import traced_rows, what_fits
from train.plan.candidates import Candidate, Machine, Plan, describe, make_plan
from train.run.command_line import main

DEVICES = 4


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes traces find these bytes, one after the other; the configurations are recorded."""

    def find(*bytes_: float) -> list[Any]:
        found, seen = iter(bytes_), []

        def memory_of(config: Any, mesh: Any, **_: Any) -> SimpleNamespace:
            seen.append(config)
            return SimpleNamespace(total=next(found))

        monkeypatch.setattr(traced_rows, "memory_of", memory_of)
        return seen

    return find


def planned(over_the_first: float) -> tuple[Plan, Machine]:
    """A plan with so many times the memory that the first row of all takes by the estimate."""
    asked = config("llama3-8b", 4)
    everything = Machine(DEVICES, H100, GPUS["H100"].memory)
    [first, *_] = make_plan(asked, everything).fitting
    share = over_the_first * first.bytes / everything.limit
    machine = Machine(DEVICES, H100, int(share * everything.memory))
    return make_plan(asked, machine), machine


def trace(plan: Plan, machine: Machine) -> Candidate | None:
    traced_rows.trace_first(plan, machine)
    return next(iter(plan.candidates), None)


def test_what_fits_by_a_trace_has_its_bytes(tracing: Callable[..., list[Any]]) -> None:
    plan, machine = planned(1.02)
    [before, *rest] = plan.fitting
    seen = tracing(machine.limit)
    first = trace(plan, machine)
    assert first is not None
    assert (first.config, first.bytes) == (before.config, machine.limit)
    assert seen == [before.config]
    assert plan.fitting[1:] == rest


def test_what_does_not_fit_by_a_trace_leaves_the_plan(tracing: Callable[..., list[Any]]) -> None:
    plan, machine = planned(1.02)
    first, second, *_ = plan.fitting
    refused = sum(plan.refused.values())
    seen = tracing(machine.limit + 1, machine.limit)
    found = trace(plan, machine)
    assert found is not None and found.config == second.config
    assert all(each.config != first.config for each in plan.fitting)
    assert sum(plan.refused.values()) > refused
    assert seen[0] == first.config


@pytest.mark.parametrize("too_much", [0, 1])
def test_what_nearly_fits_is_traced_where_nothing_does(
    too_much: int, tracing: Callable[..., list[Any]]
) -> None:
    _, machine = planned(1.0)
    plan = make_plan(config("llama3-8b", 4), Machine(DEVICES, H100, machine.memory // 100))
    assert plan.smallest is not None
    plan.fitting, limit = [], int(plan.smallest.bytes / 1.05)
    near = Machine(DEVICES, H100, int(limit * machine.memory / machine.limit))
    seen = tracing(near.limit + too_much)
    refused, smallest = plan.refused.total(), describe(plan.smallest.config, plan.smallest.sizes)
    found = trace(plan, near)
    assert len(seen) == 1
    assert (found is None) == bool(too_much)
    assert plan.is_too_large == bool(too_much)
    # A row is not among what does not fit.
    assert plan.refused.total() == refused - (not too_much)
    is_example = any(plan.nearest(reason).startswith(f"{smallest}:") for reason in plan.refused)
    assert is_example == bool(too_much)


def test_the_only_row_that_does_not_fit_by_a_trace_is_the_example_of_its_reason(
    tracing: Callable[..., list[Any]],
) -> None:
    plan, machine = planned(1.02)
    plan = Plan(fitting=plan.fitting[:1])
    tracing(machine.limit + 2e9)
    assert trace(plan, machine) is None
    assert plan.is_too_large
    [(reason, [(needed, example)])] = plan.examples.items()
    assert reason == "activations and gradients do not fit" and needed == machine.limit + 2e9
    gb = (
        f"{machine.limit / 1e9 + 2:.1f} GB by a trace, and {machine.limit / 1e9:.1f} GB may be used"
    )
    assert example.endswith(f"microbatches 1: takes {gb}")


@pytest.mark.parametrize(("share_of_limit", "devices"), [(1.0, 4), (1.01, 8)])
def test_what_is_advised_fits_by_a_trace(
    share_of_limit: float,
    devices: int,
    tracing: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next number of GPUs, whose estimate is far below the limit."""
    announced: list[str] = []

    def announce(what: str) -> contextlib.nullcontext[None]:
        announced.append(what)
        return contextlib.nullcontext()

    monkeypatch.setattr(traced_rows, "tracing", announce)
    asked = config("llama3-8b", 8)
    of_4, of_8 = (
        min(each.bytes for each in make_plan(asked, Machine(n, H100, 10**12)).fitting)
        for n in (4, 8)
    )
    machine = Machine(2, H100, int(1.05 * of_4 / (1 - MARGIN)))
    assert 0.9 * machine.limit > of_8
    seen = tracing(*[share_of_limit * machine.limit] * 20)
    found, _ = what_fits.ways_to_fit(asked, machine)
    assert [way for way in found if "devices" in way] == [f"--devices {devices}"]
    assert len(seen) == len(announced) == len({*announced})
    assert any("with --devices 4, whose" in what for what in announced)


def test_rows_of_the_same_mesh_leave_with_what_does_not_fit(
    tracing: Callable[..., list[Any]],
) -> None:
    plan, machine = planned(1.02)
    first, before = plan.fitting[0], len(plan.fitting) + sum(plan.refused.values())
    tracing(2 * machine.limit, *[machine.limit] * 2)
    off = 2 * machine.limit / first.bytes
    stay = [e for e in plan.fitting if e.sizes != first.sizes or off * e.bytes <= machine.limit]
    trace(plan, machine)
    assert [each.config for each in plan.fitting] == [each.config for each in stay]
    assert len(plan.fitting) + sum(plan.refused.values()) == before


def test_a_first_row_that_is_not_traced_says_so(
    tracing: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(traced_rows, "_MOST_TRACES", 1)
    tracing(*[74e9] * 2)
    main(shlex.split("--plan --preset qwen3-32b --device H100 --devices 8"))
    output = capsys.readouterr().out
    is_near = float(re.findall(r"^data=.*[ ~]([\d.]+)$", output, re.MULTILINE)[0]) > 62.2
    assert is_near and "this one is not traced, and near the 69.0 GB" in output


def test_estimates_are_marked_in_the_table(
    tracing: Callable[..., list[Any]], capsys: pytest.CaptureFixture
) -> None:
    plan = shlex.split("--plan --preset llama3-8b --device H100 --devices 8")
    seen = tracing(65e9, 65e9, 65e9)
    main([*plan, "--mesh.tensor", "2", "--mesh.data", "2"])
    output = capsys.readouterr().out
    rows = re.findall(r"^data=.* (\S+)$", output, re.MULTILINE)
    assert len(seen) == rows.count("65.0") >= 1
    assert all(row == "65.0" or row.startswith("~") for row in rows) and rows[0] == "65.0"
    assert "GB after ~ are estimates; the others were traced, as in a dry run, since" in output
    main([*plan, "--mesh.fsdp", "8"])
    output = capsys.readouterr().out
    assert re.findall(r"^data=.* (\S)\S+$", output, re.MULTILINE) == ["~"] * 3
    assert "GB after ~ are estimates; a dry run traces the memory of a row" in output


@pytest.mark.parametrize(("preset", "is_near"), [("mixtral-8x7b", True), ("llama3-8b", False)])
def test_estimates_of_experts_are_near_the_limit_sooner(preset: str, is_near: bool) -> None:
    everything = Machine(DEVICES, H100, 10**12)
    [first, *_] = make_plan(config(preset, 2), everything).fitting
    limit = first.bytes / 0.7
    machine = Machine(DEVICES, H100, int(limit / (1 - MARGIN)))
    assert traced_rows.is_near(first, machine) == is_near


def test_what_is_far_below_the_limit_is_not_traced(tracing: Callable[..., list[Any]]) -> None:
    plan, machine = planned(1.2)
    seen, before = tracing(), list(plan.fitting)
    trace(plan, machine)
    assert plan.fitting == before
    assert not seen


@pytest.mark.exhaustive
def test_the_first_row_says_what_its_dry_run_says(capsys: pytest.CaptureFixture) -> None:
    main(shlex.split("--plan --preset qwen3-32b --device H100 --devices 8"))
    output = capsys.readouterr().out
    assert "; the others were traced, as in a dry run" in output
    [_, row] = re.findall("^(mesh .*|data=.*)$", output, re.MULTILINE)[:2]
    [command] = re.findall("without GPUs: python -m train (.*)$", output, re.MULTILINE)
    main(shlex.split(command))
    dry_run = capsys.readouterr().out
    assert "fits into the 73,600,000,000 bytes" in dry_run
    [total] = re.findall(r"total +([\d,]+)", dry_run)
    assert f"{int(total.replace(',', '')) / 1e9:.1f}" == row.split()[-1]
