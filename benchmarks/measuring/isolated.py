"""Work in a process of its own, which is killed if one of its steps hangs.

A kernel that waits for other devices can wait forever.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

#: The result of a step that took too long, or that ended its process.
HUNG = "HUNG or died"


class Message(NamedTuple):
    """A message of the other process: a step begins, or ended with a result.

    Attributes:
      subject: what the step belongs to.
      step: its name.
      result: None where the step begins.
    """

    subject: Any
    step: Any
    result: Any = None


def run_isolated(
    work: Callable[..., None],
    arguments: Callable[[], tuple[Any, ...] | None],
    step_seconds: float,
    note: Callable[[Message], None],
) -> None:
    """Has one process after another do what is left, until nothing is, or one changes nothing.

    Args:
      work: a function of a module. It is called in the other process with its arguments and a
        `Connection` to send each `Message` by.
      arguments: returns the arguments of the next process, which say what is left; None to end.
      step_seconds: a step, or a silence between steps, that takes longer hangs.
      note: called for every result, including that of a step that hung.

    Raises:
      ValueError: as `work` does.
      RuntimeError: if a process brings nothing forward although something is left to do.
    """
    context = multiprocessing.get_context("spawn")
    before = None
    while (given := arguments()) is not None:
        if given == before:
            raise RuntimeError("a process ended, or took too long, before the first of its steps")
        before = given
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(work, given, sender), daemon=True)
        process.start()
        sender.close()
        try:
            receive_all(receiver, step_seconds, note)
        finally:
            process.kill()
            process.join()


def _work(work: Callable[..., None], given: tuple[Any, ...], connection: Connection) -> None:
    """Sends a ValueError, with which settings are refused, to the process that gave them."""
    try:
        work(*given, connection)
    except ValueError as error:
        connection.send(error)


def receive_all(receiver: Connection, step_seconds: float, note: Callable[[Message], None]) -> None:
    """Notes all results of a process, until it ends or hangs; raises what it raised."""
    begun = None
    while receiver.poll(step_seconds):
        try:
            message: Message | ValueError = receiver.recv()
        except EOFError:
            break
        if isinstance(message, ValueError):
            raise message
        begun = message if message.result is None else None
        if message.result is not None:
            note(message)
    if begun is not None:
        note(begun._replace(result=HUNG))
