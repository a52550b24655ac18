"""Work in other processes: a step that hangs ends, and another process does what is left."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from benchmarks.measuring.isolated import HUNG, Message, receive_all, run_isolated


def test_a_step_that_hangs_is_noted() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(Message("site", "first"))
    sender.send(Message("site", "first", 0))
    sender.send(Message("site", "second"))
    noted: list[Message] = []
    receive_all(receiver, 0.01, noted.append)
    assert noted == [Message("site", "first", 0), Message("site", "second", HUNG)]


def test_another_process_does_the_rest_and_refusals_are_raised_here() -> None:
    """One process dies in its first step, one ends well, and the settings of one are refused."""
    noted: list[Message] = []
    given = iter([("dies",), ("ends",), ("refuses",)])
    with pytest.raises(ValueError, match="devices=99: there are 8"):
        run_isolated(_work, lambda: next(given), 60.0, noted.append)
    assert noted == [Message("dies", "step", HUNG), Message("ends", "step", 1)]


def test_a_process_that_brings_nothing_forward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before the first of its steps"):
        run_isolated(_ends, lambda: (), 60.0, lambda message: pytest.fail(str(message)))


def _work(what: str, connection: Connection) -> None:
    if what == "refuses":
        raise ValueError("devices=99: there are 8")
    connection.send(Message(what, "step"))
    if what == "dies":
        os._exit(1)
    connection.send(Message(what, "step", 1))


def _ends(connection: Connection) -> None:
    del connection
