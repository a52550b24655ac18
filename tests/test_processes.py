"""Two processes of two simulated devices each: rings across them and within each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.processes import ACROSS, IMPLEMENTATIONS_ON, PROCESSES, Report
from tests.reference import OPS, PEER_KERNELS

every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[list[Report]]:
    return processes.start([processes.ON_THE_CPU] * PROCESSES, tmp_path_factory.mktemp("reports"))


def of(reports: list[Report], mesh: tuple[int, int], op: str, implementation: str | None) -> Report:
    (report,) = (r for r in reports if (tuple(r.mesh), r[1], r[2]) == (mesh, op, implementation))
    return report


@every_op
@pytest.mark.parametrize(
    ("mesh", "implementation"),
    [(mesh, name) for mesh, names in IMPLEMENTATIONS_ON.items() for name in names],
)
def test_results_and_gradients(
    reports: list[list[Report]], mesh: tuple[int, int], op: str, implementation: str | None
) -> None:
    for process in reports:
        assert of(process, mesh, op, implementation).error <= 1


@every_op
def test_the_choice_across_processes_is_xla(reports: list[list[Report]], op: str) -> None:
    for process in reports:
        assert of(process, ACROSS, op, None).decisions == ["xla"]


@pytest.mark.needs("fused", "one_shot")
def test_the_reason_is_reported_once(reports: list[list[Report]]) -> None:
    for process in reports:
        across = [r for r in process if tuple(r.mesh) == ACROSS]
        warnings = [sentence for r in across for sentence in r.warnings]
        assert warnings
        assert len(set(warnings)) == len(warnings)
        # Kernels have other reasons besides, as that there are none for CPUs.
        others = [r for r in across if r.implementation not in PEER_KERNELS]
        assert all("process" in sentence for r in others for sentence in r.warnings)


def test_processes_agree(tmp_path: Path) -> None:
    environments = [processes.ON_THE_CPU] * PROCESSES
    first, second = processes.run(environments, tmp_path, "tests.agreeing_processes")
    assert first["seconds"] and first["seconds"] == second["seconds"]
    assert first["file"] == second["file"]
    # Both have two devices of one node, and NCCL between them.
    assert {fields["transport"] for fields in first["fields"]} == {"nccl_symmetric"}
    assert first["decisions"] == second["decisions"] and set(first["decisions"]) == {"ring"}
    assert first["difference"] == ""
    assert second["difference"].startswith(
        "process 1 decides differently from process 0 about step: scatter: xla, where process 0"
        " has scatter: ring; give all processes the same "
    )
