"""Messages of processes that choose differently."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from collective_matmul import agreement
from collective_matmul.agreement import (
    DisagreementError,
    check_same,
    check_same_order,
    exchange,
)
from tests import processes


class Store:
    """The key-value store of processes that are simulated one after the other."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.fixture
def processes_at(monkeypatch: pytest.MonkeyPatch):
    """A function that goes on in the process of a number, of three."""
    store = Store()
    monkeypatch.setattr(agreement, "key_value_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    checked = {number: type(agreement._checked)() for number in range(3)}

    def at(number: int) -> None:
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(agreement, "_checked", checked[number])

    return at


@pytest.fixture
def processes_checking(processes_at):
    """A function that checks choices in the process of a number, of three."""

    def check(number: int, program: str, **choices: str) -> None:
        processes_at(number)
        check_same(program, {key: [value] for key, value in choices.items()})

    return check


def test_the_last_process_names_the_choice_that_differs(processes_checking) -> None:
    processes_checking(0, "step", gather="ring", scatter="ring")
    processes_checking(2, "step", gather="ring", scatter="ring")
    with pytest.raises(
        DisagreementError,
        match=r"^scatter: process 1 has chosen xla, and process 0 ring; .* give all processes the",
    ):
        processes_checking(1, "step", gather="ring", scatter="xla")


def test_the_last_process_names_what_is_communicated_in_another_order(processes_at) -> None:
    for number, order in enumerate((["gather", "sum"], ["gather", "sum"])):
        processes_at(number)
        check_same_order("step", order)
    processes_at(2)
    with pytest.raises(
        DisagreementError,
        match=r"^step: XLA has not compiled one program .*: number 2 of what communicates is"
        r" permute in process 2, and sum in process 0\..* --xla_gpu_shard_autotuning on",
    ):
        check_same_order("step", ["gather", "permute", "sum"])


@pytest.mark.parametrize("order", [["gather"], ["gather", "sum", "sum"]])
def test_a_process_may_not_communicate_more_or_less(processes_at, order: list[str]) -> None:
    processes_at(0)
    check_same_order("step", ["gather", "sum"])
    processes_at(1)
    with pytest.raises(DisagreementError, match="missing"):
        check_same_order("step", order)


def test_programs_are_told_apart_by_names_and_order(processes_checking) -> None:
    for number in range(3):
        processes_checking(number, "step", gather="ring")
        processes_checking(number, "evaluation", gather="xla")
        processes_checking(number, "step", gather="xla")
    with pytest.raises(DisagreementError):
        processes_checking(0, "step", gather="xla")
        processes_checking(1, "step", gather="ring")


def test_what_only_one_process_has_traced_again_is_no_difference(processes_checking) -> None:
    processes_checking(0, "step", gather="ring", scatter="ring")
    processes_checking(1, "step", gather="ring")
    processes_checking(2, "step")


def test_one_process_agrees_with_itself() -> None:
    check_same("step", {"gather": ["ring"]})
    assert exchange([1, None]) == [[1, None]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of the processes."""
    folder = tmp_path_factory.mktemp("found")
    files = [folder / f"{number}.json" for number in range(processes.PROCESSES)]
    environments = [processes.ON_THE_CPU] * len(files)
    processes.run("tests.agreeing_processes", environments, [[str(file)] for file in files])
    return [json.loads(file.read_text()) for file in files]


def test_processes_compare_what_they_choose_before_they_compile(
    found: list[dict[str, Any]],
) -> None:
    first, second = found
    assert first["traces"] == second["traces"] == ["ring"]
    assert first["compiled"] == second["compiled"] == 1
    assert "no_such_option" in first["error"]
    assert second["error"].startswith("DisagreementError: all_gather_matmul float32 [2,8]@[8,2]")
    assert "in run.<locals>.gather: process 1 has chosen ring, and process 0 xla" in second["error"]


def test_processes_tune_together(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert set(first["seconds"]) == {"xla", "ring", "compute_only"}
    assert first["fields"]["transport"] == "nccl"
    assert first["fields"]["devices"] == processes.PROCESSES * processes.LOCAL_DEVICES
    assert '4 × cpu, 2 processes"' in first["table"]
    for key in ("seconds", "fields", "table"):
        assert first[key] == second[key]
