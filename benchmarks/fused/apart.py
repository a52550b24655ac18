"""Cases in a process of their own, which is killed where one of their steps hangs.

A kernel that waits for other devices can wait forever.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

#: What a step that took too long, or ended its process, has in place of a result.
HUNG = "HUNG or died"


class Said(NamedTuple):
    """What the other process says: that a step begins, where there is no result, or what came out.

    Attributes:
      case: that it belongs to.
      step: its name.
      result: not None.
    """

    case: Any
    step: Any
    result: Any = None


def run_apart(
    work: Callable[..., None],
    arguments: Callable[[], tuple[Any, ...] | None],
    step_seconds: float,
    note: Callable[[Said], None],
) -> None:
    """Has one process after another do what is left, until nothing is, or one changes nothing.

    Args:
      work: called in the other process, with its arguments and a `Connection` to send `Said` by.
        A function of a module.
      arguments: gives those of the next process: what is left; or None to end.
      step_seconds: a step, or a silence between steps, that takes longer hangs.
      note: called for every result, that of a step that hung included.

    Raises:
      ValueError: as `work` does.
      RuntimeError: if nothing comes of a process and something is left to do.
    """
    context = multiprocessing.get_context("spawn")
    before = None
    while (given := arguments()) is not None:
        if given == before:
            raise RuntimeError("a process ended, or took too long, before the first of its steps")
        before = given
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_carry_out, args=(work, given, sender), daemon=True)
        process.start()
        sender.close()
        try:
            listen(receiver, step_seconds, note)
        finally:
            process.kill()
            process.join()


def _carry_out(work: Callable[..., None], given: tuple[Any, ...], connection: Connection) -> None:
    """Sends the error that settings are refused with to where they were given."""
    try:
        work(*given, connection)
    except ValueError as error:
        connection.send(error)


def listen(receiver: Connection, step_seconds: float, note: Callable[[Said], None]) -> None:
    """Notes what a process says, until it ends, or hangs; raises what it raised."""
    doing = None
    while receiver.poll(step_seconds):
        try:
            said: Said | ValueError = receiver.recv()
        except EOFError:
            break
        if isinstance(said, ValueError):
            raise said
        doing = said if said.result is None else None
        if said.result is not None:
            note(said)
    if doing is not None:
        note(doing._replace(result=HUNG))
