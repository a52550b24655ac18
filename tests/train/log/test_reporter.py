"""The table on the console has one heading and aligned columns."""

from __future__ import annotations

import dataclasses
import io

import pytest

from tests.train.reports import RECORD, run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_is_aligned_under_one_heading() -> None:
    unknown = dataclasses.replace(RECORD, step=100000, loss=0.5, mfu=None, memory_bytes=None)
    heading, *lines = run([RECORD, unknown, RECORD]).splitlines()
    names = "step", "loss", "grad norm", "learning rate", "tokens/s/device", "TFLOP/s/device"
    for name in (*names, "MFU", "memory"):
        assert heading.count(name) >= 1
    assert len(lines) == 3
    assert {len(line) for line in lines} == {len(heading)}
    for text in (" 10 ", "2.5000", "3.000e-04", "12,346", "412.5", "41.7%", "3.00 GiB", "0.250 s"):
        assert text in lines[0]
    assert lines[1].count("n/a") == 2
    assert lines[0].index("41.7%") + 5 == lines[1].index("n/a") + 3, "right-aligned"


def test_a_progress_bar_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert "10/100" in run([RECORD], output=Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "10/100" not in run([RECORD])
