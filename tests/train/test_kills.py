"""A killed trainer loses nothing that was saved, and resumes bit for bit."""

from __future__ import annotations

import pytest

from tests.train import kills


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_run_killed_at_random_steps_computes_the_same(tmp_path, monkeypatch, times):
    monkeypatch.setattr(kills, "STEPS", 30)
    monkeypatch.setattr(kills, "LONGEST_LIFE", 12)
    whole = kills.uninterrupted(tmp_path)
    assert len(whole) == kills.STEPS
    history = kills.run_and_kill(tmp_path, kills=times, seed=5)
    kills.check(whole, tmp_path, history)
    assert any(kill.saved for kill in history)
