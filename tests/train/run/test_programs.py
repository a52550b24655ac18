"""Programs that all processes of a run compile together."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul import overlap_jit
from collective_matmul.dispatch.recording import Decision
from collective_matmul.jit.peer_decision import PeerKernelDecision
from tests import processes
from tests.hopper import needs_kernels
from train.processes import agreement
from train.processes.agreement import AgreedError
from train.run.programs import compile_together

OP = Decision(site=None, implementation="fused", reason="measured")
ALLOWED = PeerKernelDecision(True, "they save much", withheld=(OP,))


class Jitted:
    """A function of `overlap_jit` in a process of several; notes what is done with it."""

    def __init__(self, exchanged: list[Any]) -> None:
        self.exchanged, self.done = exchanged, []

    def decided(self, x: Any) -> Any:
        self.done.append(f"decided after {len(self.exchanged)}")
        return SimpleNamespace(peer_kernels=ALLOWED, decisions=(OP,), lower=self.lower)

    def lower(self) -> Any:
        self.done.append("lowered")
        return SimpleNamespace(compile=lambda: self.done.append("compiled"))


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pretends that another process says what this one does, or what a test says."""
    found: dict[str, Any] = {"exchanged": []}

    def exchange(value: Any) -> list[Any]:
        found["exchanged"].append(value)
        return [
            value,
            found.get("exchanged by the other", value) if isinstance(value, dict) else value,
        ]

    monkeypatch.setattr(agreement, "exchange", exchange)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    return found


def test_processes_come_together_before_they_trace(other: dict[str, Any]) -> None:
    jitted = Jitted(other["exchanged"])
    program = compile_together(jitted, None)
    assert jitted.done == ["decided after 1", "lowered", "compiled"]
    assert program.lines == [
        "collective matmuls of different shape: 1 fused (measured)",
        "kernels that address peers' memory are allowed: they save much",
    ]


@pytest.mark.parametrize("theirs", [{"fused (measured)": 1}, {"xla (measured)": 1}])
def test_processes_that_decide_differently_lower_nothing(
    theirs: dict[str, int], other: dict[str, Any]
) -> None:
    """Lowering would wait for the memory that the other process does not share."""
    other["exchanged by the other"] = theirs
    jitted = Jitted(other["exchanged"])
    with pytest.raises(AgreedError, match="process 1 has another choice of backends than process"):
        compile_together(jitted, None)
    assert jitted.done == ["decided after 1"]


def test_a_program_of_one_process() -> None:
    program = compile_together(overlap_jit(lambda x: 2 * x), np.ones(3, np.float32))
    np.testing.assert_array_equal(program.run(np.ones(3, np.float32)), 2 * np.ones(3))
    assert program.lines == ["collective matmuls of different shape: "]


@needs_kernels
def test_two_processes_decide_together(tmp_path: Path) -> None:
    """With memory that both share, that none shares, and where they find out different things."""
    files = [tmp_path / f"{number}.json" for number in range(processes.PROCESSES)]
    environments = [processes.ON_THE_CPU | {"JAX_NUM_CPU_DEVICES": "1"}] * len(files)
    processes.run("tests.train.deciding_processes", environments, [[str(f)] for f in files])
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    both, neither, one = first
    assert both[0].startswith("collective matmuls of different shape: 1 fused (")
    assert both[1].startswith("kernels that address peers' memory are allowed: they are predicted")
    assert neither[0].startswith("collective matmuls of different shape: 1 xla (")
    assert neither[1].startswith(
        "kernels that address peers' memory are not allowed: no op of the program would use them;"
        " fused is not possible: 2 processes:"
    )
    assert "cannot share: no pool" in neither[1]
    assert one[0].startswith("process 1 has another choice of backends than process 0: ")
    assert one[0].endswith("the same library and the same environment")
