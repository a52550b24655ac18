"""A trainer struck by faults loses nothing that was saved, and resumes bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import faults

MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]


def test_a_run_struck_by_signals_computes_the_same(tmp_path: Path) -> None:
    lives = faults.strike_often(tmp_path, ["SIGTERM", "SIGKILL"], seed=17)
    assert any(life.whole for life in lives)


@pytest.mark.exhaustive
def test_a_run_struck_by_every_fault_computes_the_same() -> None:
    if subprocess.run(MOUNT, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system, to fill it")
    command = [sys.executable, "-m", "tests.train.faults", "12", "--seed", "3"]
    struck = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert struck.returncode == 0, struck.stdout + struck.stderr
    assert "0 checkpoints lost" in struck.stdout
