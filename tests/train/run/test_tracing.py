"""Collections of garbage during a trace, and its announcement."""

from __future__ import annotations

import gc
import time

import pytest

from train.run import tracing as module
from train.run.tracing import tracing


def test_garbage_is_collected_rarely_while_something_is_traced():
    of_tests = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with pytest.raises(ValueError), tracing():
            assert gc.get_threshold() == (100_000, 10, 10)
            raise ValueError
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*of_tests)


@pytest.mark.parametrize(("seconds", "printed"), [(60.0, ""), (0.0, "tracing 80 layers ...\n")])
def test_long_traces_are_announced_on_stderr(
    seconds: float,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(module, "_SECONDS", seconds)
    with tracing("80 layers"):
        time.sleep(0.1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", printed)
