"""Two processes of two GPUs each: NCCL carries rings across them, peers' copies those within."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from tests import processes
from tests.conftest import skip_without
from tests.processes import ACROSS, LOCAL_DEVICES, PROCESSES

pytestmark = pytest.mark.gpu


def test_rings_across_processes_and_within(tmp_path: Path) -> None:
    if jax.default_backend() == "cpu":
        environments = [processes.ON_THE_CPU] * PROCESSES
    else:
        skip_without(PROCESSES * LOCAL_DEVICES)
        environments = [on_gpus(number) for number in range(PROCESSES)]
    for reports in processes.start(environments, tmp_path):
        assert reports
        for report in reports:
            assert report.error <= 1, report
        across = [r for r in reports if tuple(r.mesh) == ACROSS]
        assert all(r.decisions == ["xla"] for r in across if r.implementation is None)
        warnings = [sentence for r in across for sentence in r.warnings]
        assert warnings
        assert len(set(warnings)) == len(warnings)


def on_gpus(number: int) -> dict[str, str]:
    """The environment of a process with GPUs of its own, beside what this process has allocated."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(d.local_hardware_id) for d in jax.devices()]
    own = names[number * LOCAL_DEVICES : (number + 1) * LOCAL_DEVICES]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(own),
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
