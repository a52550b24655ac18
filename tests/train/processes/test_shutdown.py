"""Signals are answered while the main thread is inside of compiled code, as in XLA for minutes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# This call releases the interpreter's lock and takes many minutes. Python runs no handler before it
# ends.
BUSY = """
import hashlib
from train.processes.shutdown import Shutdown

with Shutdown() as shutdown:
    {defer}
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        # A shell's background job ignores SIGINT, and its children with it.
        ["env", "--default-signal=INT", sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_stops_at_once(name: str) -> None:
    number = signal.Signals[name]
    with start(BUSY.format(defer="shutdown.defer()")) as process:
        process.send_signal(number)
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first == f"{name}: finishing the step and saving; a second signal stops at once\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
        assert process.stderr.readline().startswith(f"{name}: stopped at once, the save that was")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_first_signal_stops_at_once_before_training(name: str) -> None:
    number = signal.Signals[name]
    with start(BUSY.format(defer="")) as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read().startswith(f"{name}: stopped at once, before the first step")


IGNORED = """
import os, signal
from train.processes.shutdown import Shutdown

signal.signal(signal.SIGINT, signal.SIG_IGN)
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
with Shutdown() as shutdown:
    shutdown.defer()
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    assert not shutdown.requested
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
"""


def test_an_ignored_signal_stays_ignored_and_handlers_are_put_back() -> None:
    with start(IGNORED) as process:
        assert process.wait(timeout=60) == 0
