"""A trainer struck by faults loses nothing that was saved, and resumes bit for bit.

``python -m tests.train.faults 100`` does the same with many faults, those of disks among them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.train import faults


@pytest.mark.exhaustive
def test_a_run_struck_by_signals_computes_the_same(tmp_path: Path) -> None:
    more = shlex.split(faults.SHARDED)
    lives = faults.strike_often(tmp_path, ["SIGTERM", "SIGKILL"], seed=17, more=more)
    assert any(life.whole for life in lives)
